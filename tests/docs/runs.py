"""What runs each command of the documents: a test, or why none can.

RUNS: the first words of a command -> how it is run; the longest entry that fits counts. A test is
named as `path::function`. New commands in the documents need an entry here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Run:
    """How a command is run.

    by: where: `test`, `gpu` (needs AMD GPUs), `engine` (needs a container engine) or `index`
        (fetches packages). Of the last three the options are checked, and `test`, if there is one,
        runs the nearest thing that can be run here.
    test: a test as `path::function`.
    """

    by: str
    test: str = ""


DEMO = "tests/vllm_plugin/test_demo.py::test_demo"
DOCS = "tests/docs/test_commands.py::"
BENCH = Run("test", "tests/docs/test_benchmarks.py::test_a_benchmark_runs")
IMAGE = "tests/docker/test_image.py::"
SERVE_LINE = "tests/vllm_plugin/test_serve_line.py::test_it_becomes_a_configuration"

VERIFY = "tests/cli/test_verify.py::"

RUNS: dict[tuple[str, ...], Run] = {
    ("make", "env"): Run(
        "test", "tests/test_setup_env.py::test_nothing_there_builds_all_and_then_is_current"
    ),
    ("make", "demo"): Run("test", DEMO),
    ("make", "demo-pd"): Run("test", "tests/vllm_plugin/test_pd_slow.py::test_demo_pd"),
    ("make", "demo-emulated"): Run(
        "test", "tests/vllm_plugin/test_emulated_slow.py::test_the_demo"
    ),
    ("make", "serve"): Run(
        "test", "tests/cli/test_demo_server.py::test_ctrl_c_is_how_serving_ends"
    ),
    ("make", "test"): Run("test", DOCS + "test_make_targets_run_what_they_say"),
    ("make", "test-slow"): Run("test", DOCS + "test_make_targets_run_what_they_say"),
    ("make", "test-gpu"): Run("gpu", DOCS + "test_make_targets_run_what_they_say"),
    ("make", "lint"): Run("test", DOCS + "test_make_targets_run_what_they_say"),
    ("make", "format"): Run("test", DOCS + "test_make_targets_run_what_they_say"),
    ("make", "verify"): Run("test", DOCS + "test_make_targets_run_what_they_say"),
    ("make", "bench"): BENCH,
    ("make", "docs"): Run("test", "tests/docs/test_site.py::test_the_site_builds"),
    ("make", "clean"): Run("test", DOCS + "test_make_clean"),
    ("mkdocs", "build"): Run("test", "tests/docs/test_site.py::test_the_site_builds"),
    ("rocm-msa", "capacity"): Run("test", DOCS + "test_cheap_commands_run"),
    ("rocm-msa", "make-checkpoint"): Run("test", DOCS + "test_cheap_commands_run"),
    ("rocm-msa", "doctor"): Run("test", DOCS + "test_cheap_commands_run"),
    ("rocm-msa", "compile"): Run("test", "tests/cli/test_compile.py::test_compile"),
    ("rocm-msa", "verify"): Run("test", VERIFY + "test_the_emulator_passes_the_small_set"),
    ("rocm-msa", "verify", "--target", "gpu"): Run(
        "gpu", VERIFY + "test_an_nvidia_gpu_checks_triton_and_says_so"
    ),
    ("rocm-msa", "serve"): Run("test", "tests/soak/test_soak.py::test_soak"),
    ("rocm-msa", "serve", "MODEL"): Run("gpu", SERVE_LINE),
    ("vllm", "serve"): Run("gpu", SERVE_LINE),
    ("pip", "install", "."): Run(
        "test", "tests/docker/test_wheel.py::test_the_wheel_works_without"
    ),
    ("pip", "install"): Run("index", "tests/docker/test_wheel.py::test_the_wheel_works_without"),
    ("python", "-m", "build"): Run("test", "tests/docker/test_wheel.py::test_what_the_wheel_holds"),
    ("python", "-m", "gfx950_emu"): Run("test", "tests/emulator/test_inspect.py::test_as_a_module"),
    ("python", "tools/fetch_vllm_sources.py"): Run(
        "test", "tests/vllm_plugin/test_compat_contract.py::test_fields"
    ),
    ("python", "tools/make_opcode_checks.py"): Run(
        "test", "tests/cli/test_verify_data.py::test_the_tool_writes_checks_of_every_kernel"
    ),
    ("python", "examples/pd/proxy.py"): Run(
        "test", "tests/vllm_plugin/test_pd_slow.py::test_demo_pd"
    ),
    ("python", "benchmarks/bench_cache_accuracy.py"): BENCH,
    ("python", "benchmarks/bench_dcp_gfx950.py"): BENCH,
    ("python", "benchmarks/bench_dcp_multi.py"): BENCH,
    ("python", "benchmarks/bench_emulator.py"): BENCH,
    ("python", "benchmarks/bench_flydsl_decode.py"): BENCH,
    ("python", "benchmarks/bench_mono_gfx950.py"): BENCH,
    ("python", "benchmarks/bench_ops_gfx950.py"): BENCH,
    ("python", "benchmarks/bench_transfer.py"): BENCH,
    ("python", "benchmarks/bench_msa_triton.py"): Run("gpu", BENCH.test),
    ("docker", "build"): Run("engine", IMAGE + "test_both_stages_in_clean_environments"),
    ("docker", "compose"): Run("engine", IMAGE + "test_vllm_takes_the_commands"),
}


def run_of(words: list[str]) -> Run | None:
    """How the command is run; None when nobody said."""
    for length in range(len(words), 0, -1):
        if found := RUNS.get(tuple(words[:length])):
            return found
    return None
