"""Lines of code in advice: names that C++ takes, memory whose bounds were guessed, and lines that compile."""

import re
import shutil
import subprocess

import pytest
from exports import MIB, VA

from nsan.analysis.advisor.advice import Target
from nsan.analysis.advisor.calls import (
    ADVISE_NOTE,
    PREFETCH_NOTE,
    advise_calls,
    prefetch_calls,
)
from nsan.analysis.advisor.prefetched import Prefetched
from nsan.analysis.advisor.rules.prefetch_harm import _in_chunks

NAMED = Target("grid", 0, 20 * MIB, VA)
NUMBERED = Target("", 3, 20 * MIB, VA)
GUESSED = Target("", 1, 8 * MIB, VA, is_guessed=True)


def chunks(n_bytes, most=None):
    return _in_chunks(Prefetched({"bytes": n_bytes}, {"device_id": 0}, None, 0), NUMBERED, most)


@pytest.mark.parametrize("name", ["class", "données", "x[3]", "a b", "device", "2x", "ns::x", ""])
def test_a_name_that_is_none_in_cpp_gives_way_to_a_number(name):
    assert Target(name, 3, MIB, VA).pointer == "p3"


def test_a_good_name_stands_for_itself():
    assert NAMED.pointer == "grid"
    assert Target("for_", 3, MIB, VA).pointer == "for_"


def test_an_address_of_one_run_is_no_expression_but_told_beside_it():
    (line,) = prefetch_calls([(GUESSED, 65536, MIB)], 0)
    code, comment = line.split("//")
    assert code.strip() == f"cudaMemPrefetchAsync((char *)p1 + 65536, {MIB}, 0, stream);"
    assert f"0x{VA:x}" in comment
    assert "guessed" in comment
    assert "0x" not in advise_calls(GUESSED, [("accessed_by", 0)])[0].split("//")[0]


def test_chunks_are_a_part_of_the_allocation_in_whole_va_blocks():
    # A quarter of 20 MiB is 5 MiB, and 4 MiB the power of two below.
    assert f"at += {4 * MIB})" in chunks(20 * MIB)[1]
    assert f"at += {2 * MIB})" in chunks(20 * MIB, 3 * MIB)[1]
    assert f"at += {32 * MIB})" in chunks(1024 * MIB)[1]
    # A loop that runs once would be the call that does harm.
    assert chunks(4 * MIB) == ()


SOURCE = """
#include <cstddef>
#include <cuda_runtime.h>
// The classic form, beside that of CUDA 13.
int cudaMemPrefetchAsync(const void *, size_t, int, cudaStream_t);
int cudaMemAdvise(const void *, size_t, cudaMemoryAdvise, int);
void run(float *p, float *p1, float *p3, float *grid, size_t bytes, cudaStream_t stream) {
%s
}
"""


def test_every_line_compiles_in_the_classic_form_and_in_that_of_cuda_13(tmp_path):
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("needs nvcc")
    said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    if "release 13" not in said:
        pytest.skip("needs CUDA 13")
    forms = re.findall(r"\(p, bytes, \{.*?\}, 0, stream\)", PREFETCH_NOTE)
    places = re.findall(r"\{cudaMemLocationType\w+, 0\}", ADVISE_NOTE)
    assert len(forms) == len(places) == 2
    lines = [
        *prefetch_calls([(NAMED, 0, MIB), (NUMBERED, 65536, MIB), (GUESSED, 4096, MIB)], 0),
        *prefetch_calls([(NUMBERED, 0, MIB)], -1),
        *advise_calls(NUMBERED, [("read_mostly", 0), ("preferred_location", -1)], 65536, MIB),
        *chunks(20 * MIB),
        *(f"cudaMemPrefetchAsync{form};" for form in forms),
        *(f"cudaMemAdvise(p, 8, cudaMemAdviseSetAccessedBy, {place});" for place in places),
    ]
    source = tmp_path / "lines.cpp"
    source.write_text(SOURCE % "\n".join(lines), encoding="utf-8")
    command = [nvcc, "-c", str(source), "-o", str(tmp_path / "lines.o")]
    tried = subprocess.run(command, capture_output=True, text=True, check=False)
    assert tried.returncode == 0, tried.stderr
