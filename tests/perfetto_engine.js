// The trace processor of Perfetto's web page, outside of a browser: its RPC stream on stdin and stdout.
const fs = require("fs");
const path = require("path");
const vm = require("vm");

const folder = process.argv[2];

class Request {
  open(_method, url) { this.url = url; }
  send() { this.response = fs.readFileSync(path.join(folder, path.basename(this.url))); }
}

const quiet = () => undefined;
const scope = {
  TextDecoder, TextEncoder, URL, performance, setTimeout, clearTimeout,
  crypto: globalThis.crypto, XMLHttpRequest: Request,
  console: { log: quiet, warn: quiet, error: quiet, info: quiet, debug: quiet },
  location: { href: "http://engine/engine_bundle.js", origin: "http://engine", search: "" },
  navigator: { userAgent: "", hardwareConcurrency: 1 },
  // The page has a worker for this; the engine asks whether it is in one.
  importScripts: quiet, WorkerGlobalScope: Object, addEventListener: quiet,
};
scope.self = scope;
vm.createContext(scope);
vm.runInContext(fs.readFileSync(path.join(folder, "engine_bundle.js"), "utf8"), scope);

const toBytes = vm.runInContext("(buffer) => new Uint8Array(buffer)", scope);
const port = { postMessage: (reply) => fs.writeSync(1, reply) };
scope.onmessage({ data: port });
process.stdin.on("data", (chunk) => {
  const own = new ArrayBuffer(chunk.length);
  new Uint8Array(own).set(chunk);
  port.onmessage({ data: toBytes(own) });
});
