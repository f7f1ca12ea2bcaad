"""`make gpu-check` without a GPU: every part at toy size on a CPU, and what must happen when things break."""

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.gpu_check import __main__ as command
from benchmarks.gpu_check import (
    card,
    carry,
    codes,
    datasheets,
    http,
    kernels,
    moe,
    parts,
    profile,
    report,
    serving,
    shapes,
    tests,
    timing,
    tools,
    wheels,
)
from benchmarks.gpu_check.bench import Bench
from benchmarks.gpu_check.bounds import Bounds, Limits, decode_steps
from benchmarks.gpu_check.names import LLAMA, NANO, QWEN
from benchmarks.gpu_check.operators import Rows
from benchmarks.gpu_check.record import Recorder, at_least, at_most, device_is_broken, kept_lines, read_record
from benchmarks.gpu_check.serving import Timeline, percentile
from benchmarks.gpu_check.verdicts import TARGETS, verdicts
from benchmarks.kernel_speed import MoELayer, MoEShape, decode_case, moe_case, prefill_case
from engine.models.families import model_config, read_model_config
from kernels.quantized.code_matmul import CodeMatmul
from tests.benchmarks.planted_faults import problems, run_planted

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
H100 = Limits(3.0e12, 794e12)


def figures(record):
    return {line["name"]: line for line in record if line["kind"] == "figure"}


# One run of all parts, in most of which a case faults. Parts of a single case are left whole here: `make
# gpu-check-faults` plants every kind of fault in each part.
PLANTS = {
    "limits: copy": "kill",
    "Llama-3-8B: decode 1 x 32": "illegal",
    "Qwen3-0.6B: decode 3 x 32": "exception",
    "Llama-3-8B: prefill 24": "oom",
    "100 users": "exception",
    "Qwen3-0.6B: transformers static batch": "oom",
    "decode 1 x 64": "hang",
    "rms_norm + residual 2 rows": "exception",
}


@pytest.fixture(scope="module")
def faulty_run(tmp_path_factory):
    """(the JSON, what was printed, the log)"""
    folder = tmp_path_factory.mktemp("faulty")
    document, printed = run_planted(folder, PLANTS)
    return document, printed, (folder / "log").read_text()


def test_faults_cost_their_own_cases_alone(faulty_run):
    document, printed, log = faulty_run
    assert not problems(document, PLANTS), printed + log[-6000:]
    assert set(document["parts"]) == {*parts.DEFAULT, "ratios"}
    assert document["tiny"] and document["packages"]["torch"] and document["limits"]["bandwidth"] > 0
    table = printed.splitlines()
    goals = [line for line in table if ": met by" in line or ": MISSED by" in line]
    assert any("nano-vllm workload / transformers one by one" in line for line in goals)
    assert max(map(len, table)) < 900 and "Verdicts" in table


@pytest.mark.parametrize("part", parts.DEFAULT)
def test_every_part_comes_to_its_end_though_a_case_of_it_faults(part, faulty_run):
    record = faulty_run[0]["parts"][part]
    values = [line["value"] for line in figures(record).values()]
    assert values and all(value >= 0 for value in values)
    failed = {line["case"] for line in record if line["kind"] == "failed"}
    assert failed <= set(PLANTS)


def test_a_faulty_kernel_costs_the_figures_that_need_it(tmp_path):
    """The prefill kernel meets an illegal address: no decode figure is lost, and no case waits for another."""
    plants = {"kernels.attention.prefill:prefill_attention": "illegal"}
    document, printed = run_planted(tmp_path, plants, "--parts", "decode attention")
    decode, attention = (document["parts"][name] for name in ("decode", "attention"))
    assert not [line for line in decode if line["kind"] == "failed"], printed
    assert {"Llama-3-8B: decode 3 x 32", "Qwen3-0.6B: decode 2 x 32 + 1 x 96"} <= set(figures(decode))
    failed = {line["case"] for line in attention if line["kind"] == "failed"}
    assert failed == {"prefill 1 x 16 of 16", "prefill 2 x 8 of 24"}
    assert {"paged_attention 1 x 64", "paged_attention int4 3 x 40"} <= set(figures(attention))


def test_steps_on_a_device_without_memory():
    pytest.importorskip("triton", reason="triton is not installed")
    path = Path(__file__).with_name("fake_cuda_cases.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-4000:] + done.stderr[-2000:]


# Later calls.


def test_a_later_call_runs_what_the_earlier_one_did_not(tmp_path):
    """The first call loses one case. The second repeats this case and those it is asked for, and no others."""
    arguments = ["--parts", "limits linears"]
    first, _ = run_planted(tmp_path, {"packed down 2 rows": "exception"}, *arguments)
    assert [line["case"] for line in first["parts"]["linears"] if line["kind"] == "failed"] == ["packed down 2 rows"]
    mended, printed = run_planted(tmp_path, {}, *arguments, "--resume", str(tmp_path), "--again", "failed,head")
    assert mended["parts"]["limits"] == first["parts"]["limits"] and "cases are not run again" in printed
    assert mended["limits"] == first["limits"] and mended["resumed"]["date"] == first["date"]
    before, after = (figures(document["parts"]["linears"]) for document in (first, mended))
    assert set(after) - set(before) == {name for name in after if "packed down 2 rows" in name}
    again = {name for name in before if before[name] != after[name]}
    assert again == {name for name in before if " head " in name}


def test_cases_that_a_part_had_no_time_for_are_run_by_a_later_call(tmp_path):
    path = tmp_path / "part.jsonl"
    recorder = Recorder(path)
    recorder.case("first", lambda: recorder.figure("first", 1.0, "ms"))
    with path.open("a") as file:
        file.write(json.dumps({"kind": "begin", "case": "slow"}) + "\n")
    recorder = Recorder(path, "the time of the part ran out", cut=True)
    recorder.give_up("the part x", "the time of the part ran out")
    recorder.skip("something", "no time is left")
    kept = kept_lines(read_record(path))
    assert {line["case"] for line in kept} == {"first"} and len(kept) == 3
    assert not kept_lines(read_record(path), ["fir"])
    Recorder.restore(path, kept)
    later, ran = Recorder(path), []
    for name in ("first", "slow"):
        later.case(name, lambda name=name: ran.append(name))
    assert ran == ["slow"]


def test_a_result_of_another_card_is_not_gone_on_from(tmp_path):
    def write(name, card, tiny=False):
        (tmp_path / name).write_text(json.dumps({"card": {"name": card}, "tiny": tiny, "parts": {}}))
        return tmp_path / name

    theirs = write("2026-01-01-gpu-check-l4.json", "NVIDIA L4")
    ours = write("2026-01-02-gpu-check-h200.json", "NVIDIA H200")
    assert carry.earlier_result(tmp_path, "NVIDIA H200", False)[0] == ours
    with pytest.raises(ValueError, match="is of NVIDIA L4, this is NVIDIA H200"):
        carry.earlier_result(theirs, "NVIDIA H200", False)
    for arguments in ((tmp_path, "NVIDIA H200", True), (tmp_path / "none", "NVIDIA H200", False)):
        with pytest.raises(ValueError, match=r"holds no result|is no result"):
            carry.earlier_result(*arguments)
    assert command.main(["--tiny", "--resume", str(tmp_path), "--json", str(tmp_path)]) == 2


def test_the_cache_of_triton_travels_without_sources_and_within_its_limit(tmp_path):
    cache, archive, target = tmp_path / "cache", tmp_path / "out" / "cache.tar.gz", tmp_path / "target"
    for name, size in (("a/k.cubin", 1000), ("a/k.json", 10), ("a/k.ttir", 500), ("b/large.cubin", 50_000)):
        path = cache / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(size))
    assert carry.save_cache(cache, archive) == 3
    assert carry.restore_cache(archive, target) == 3 and carry.restore_cache(archive, target) == 0
    assert (target / "a/k.cubin").read_bytes() == (cache / "a/k.cubin").read_bytes()
    assert not (target / "a/k.ttir").exists()
    assert carry.save_cache(cache, archive, max_bytes=5000) == 2 and archive.stat().st_size <= 5000
    assert not list(archive.parent.glob("*.part"))
    archive.write_bytes(b"no archive")
    assert carry.restore_cache(archive, tmp_path / "empty") == 0
    assert carry.restore_cache(tmp_path / "missing", target) == 0


def test_results_go_to_the_folder_that_comes_back(tmp_path, monkeypatch):
    monkeypatch.setenv("OUT", str(tmp_path))
    options = command.option_parser().parse_args(["--tiny"])
    check = command.Check(options, tmp_path)
    assert check.log_path == tmp_path / "log"
    check.run([])
    assert list(tmp_path.glob("*-gpu-check-tiny.json"))


def test_missing_wheels_end_the_command_at_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "ROOT", tmp_path)
    monkeypatch.setattr(parts.importlib.util, "find_spec", lambda name: None if name == "msgspec" else object())
    started = time.monotonic()
    assert command.main(["--parts", "decode"]) == 2 and time.monotonic() - started < 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "msgspec missing here" in line and "make gpu-wheels" in line
    assert command.main(["--ready"]) == 1 and "lacks msgspec, fastapi" in capsys.readouterr().err
    (tmp_path / ".gpu-wheels").mkdir()
    for name in wheels.PACKAGES:
        (tmp_path / ".gpu-wheels" / f"{name}-1.0-py3-none-any.whl").touch()
    assert command.main(["--ready"]) == 0


def test_the_wheels_are_those_that_the_make_target_fetches():
    makefile = (ROOT / "Makefile").read_text()
    (line,) = [line for line in makefile.splitlines() if line.startswith("GPU_PACKAGES")]
    fetched = {word.split(">=")[0].replace("-", "_") for word in line.split('"')[1::2]}
    assert fetched <= set(wheels.PACKAGES) and set(wheels.PACKAGES) - fetched == {"starlette", "pydantic_core"}


# Verdicts.


def figure(name, value, share=None, **detail):
    return {"kind": "figure", "name": name, "value": value, "unit": "ms", "share": share, "of": "floor",
            "detail": detail}  # fmt: skip


def test_every_goal_gets_a_verdict():
    step = "Llama-3-8B: decode 64 x 1024"
    record = [
        figure(step, 8.0, 0.699, floors_us={"GEMM": 3000.0, "attention": 2000.0}),
        figure("Llama-3-8B: GEMM, decode 64", 3500.0), figure("Llama-3-8B: attention, decode 64", 4000.0),
        figure("Llama-3-8B: kernel paged_attention, decode 64", 9000.0),
        figure("Llama-3-8B: gaps, device idle, decode 64", 100.0),
        figure("Llama-3-8B: decode 1 x 1024", 4.0, 0.9),
        figure("prefill_attention 1 x 8192 of 8192", 1000.0, 0.4, teraflops=360.0),
        {"kind": "failed", "case": "Llama-3-8B: decode 256 x 1024", "reason": "it hung"},
    ]  # fmt: skip
    lines = list(verdicts({"decode": record}))
    assert len(lines) == 1 + len(TARGETS)
    text = {line.split(": ")[0].strip(): line for line in lines}
    assert "met: 90% of the floor" in text["decode at batch 1"]
    assert "MISSED by 13%: 70% of the floor, owed by attention: 4,000 us, floor 2,000 us" in text["decode at 64"]
    assert "not measured (it hung)" in text["decode at 256"]
    assert "met: 360" in text["prefill attention"] and "not measured" in text["nano-vllm's workload"]


@pytest.mark.parametrize("missing", [("bandwidth", "copy"), ("rate",), ("bandwidth", "copy", "rate")])
def test_limits_that_were_not_measured_are_the_datasheets(tmp_path, monkeypatch, missing):
    monkeypatch.setattr(datasheets, "card_facts", lambda: {"name": "NVIDIA A100-SXM4-80GB"})
    setting, recorder = parts.Setting(False, tmp_path), Recorder(tmp_path / "part.jsonl")
    measured = {"bandwidth": 1.8e12, "copy": 1.7e12, "rate": 250e12}
    datasheets.keep_limits(setting, **{name: value for name, value in measured.items() if name not in missing})
    limits = datasheets.find_limits(setting, recorder)
    sheet = datasheets.DATASHEETS["A100"].limits
    assert limits.rate == (sheet.rate if "rate" in missing else 250e12)
    assert limits.bandwidth == (sheet.bandwidth if "bandwidth" in missing else 1.8e12)
    (line,) = read_record(tmp_path / "part.jsonl")
    assert line["kind"] == "skipped" and "the A100's datasheet" in line["reason"]


def test_a_read_that_is_faster_than_a_copy_is_the_limit(tmp_path):
    setting = parts.Setting(False, tmp_path)
    for measured in ({"bandwidth": 4.3e12, "copy": 4.3e12}, {"bandwidth": 4.5e12}, {"rate": 7e14}):
        datasheets.keep_limits(setting, **measured)
    limits = datasheets.find_limits(setting, Recorder(tmp_path / "part.jsonl"))
    assert (limits.bandwidth, limits.copy, limits.rate) == (4.5e12, 4.3e12, 7e14)


def test_an_error_that_sticks_ends_the_process(monkeypatch):
    def raise_error():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", raise_error)
    assert device_is_broken()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert not device_is_broken()


# NVIDIA's tools.


def test_counters_of_ncu():
    lines = ["==PROF== Connected", '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"',
             '"0","paged_attention_kernel(x)","gpu__time_duration.sum","nsecond","12,345"',
             '"0","paged_attention_kernel(x)","dram__throughput.avg.pct_of_peak_sustained_elapsed","%","91.5"',
             '"1","norm","gpu__time_duration.sum","us","3.5"', '"1","norm","other","us","7"']  # fmt: skip
    found = tools.kernels_of(lines)
    assert found["paged_attention_kernel"] == {"us": pytest.approx(12.345), "% of memory": 91.5}
    assert found["norm"] == {"us": 3.5} and tools.kernels_of(["nothing"]) == {}


@pytest.mark.parametrize("output, errors", [
    ("========= ERROR SUMMARY: 0 errors", 0), ("========= ERROR SUMMARY: 3 errors", 3),
    ("========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)", 2), ("no device", None),
])  # fmt: skip
def test_errors_of_the_sanitizer(output, errors):
    assert tools.errors_of(output) == errors


# Bounds and workloads: the figures of others.


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {name: read_model_config(shapes.write_model(name, folder, False)) for name in shapes.CONFIGS}


def test_the_workload_is_nano_vllms():
    workload = shapes.nano_workload(False)
    assert len(workload) == 256 and sum(request.output for request in workload) == 133_966
    assert all(100 <= len(request.prompt) <= 1024 and max(request.prompt) <= 10_000 for request in workload)


def test_bounds_are_those_of_the_published_shapes(models):
    llama, qwen = (Bounds(models[name], H100) for name in (LLAMA, QWEN))
    assert models[LLAMA].num_parameters() == 8_030_261_248
    assert llama.weight_bytes(1) == llama.weight_bytes(256) == pytest.approx(15.01e9, rel=1e-3)
    milliseconds = [round(1e3 * llama.decode_seconds(batch, batch * 1024), 2) for batch in (1, 16, 64, 256)]
    assert milliseconds == [5.05, 5.72, 7.87, 16.46]
    assert [round(llama.prefill_flops(n) / 1e12) for n in (1024, 8192, 32768)] == [15, 132, 739]
    lengths = [(len(request.prompt), request.output) for request in shapes.nano_workload(False)]
    assert 133_966 / qwen.workload_seconds(lengths) == pytest.approx(26_600, rel=0.01)


def test_a_large_enough_batch_is_bound_by_arithmetic(models):
    bounds = Bounds(models[LLAMA], Limits(3.0e12, 1e12))
    assert bounds.decode_seconds(64, 64) > 2 * 64 * (bounds.body_parameters + bounds.head_parameters) / 1e12


def test_products_in_8_bits_are_held_against_twice_the_rate_of_bf16(models):
    """Steps of few tokens multiply in 16 bits, and attention always does."""
    plain, ratios = Bounds(models[LLAMA], H100, quantized_bytes=1.0), []
    bounds = Bounds(models[LLAMA], H100, quantized_bytes=1.0, eight_bits_from=17)
    prompt, few = [Rows(1, 8192, 8192)], [Rows(16, 1, 1024)]
    for step in (prompt, few):
        pairs = zip(plain.operators(step), bounds.operators(step), strict=True)
        ratios.append({(wide.kind, narrow.flops / wide.flops) for wide, narrow in pairs if wide.flops})
    assert ratios == [{("gemm", 0.5), ("attention", 1.0)}, {("gemm", 1.0), ("attention", 1.0)}]
    assert 0.5 < bounds.step_seconds(prompt) / plain.step_seconds(prompt) < 0.6
    assert bounds.floor_seconds(few) == plain.floor_seconds(few)


@pytest.mark.parametrize("rounded, num_rows, share", [(None, 64, 0.4), (torch.int8, 64, 0.2), (torch.int8, 16, 0.1)])
def test_the_share_of_a_layer_in_codes_is_of_its_own_rate(tmp_path, rounded, num_rows, share):
    class Layer:
        rounded_inputs = rounded

        def __call__(self, x):
            return x

    flops = 2 * 64 * 256 * 512  # of 64 rows
    bench = Bench(Recorder(tmp_path / "part.jsonl"), CPU, SimpleNamespace(median=lambda call: 1.0),
                  Limits(1e12, flops / 0.4))  # fmt: skip
    codes.time_layer(bench, [Layer()], codes.KINDS[0], "up", 512, 256, num_rows)
    (figure,) = (line for line in read_record(tmp_path / "part.jsonl") if line["kind"] == "figure")
    assert figure["share"] == pytest.approx(share) and figure["of"] == "matmul"


@pytest.mark.parametrize("kind", codes.KINDS, ids=lambda kind: kind.name)
def test_the_bytes_of_a_layer_in_codes_are_those_that_its_kernel_reads(kind):
    matmul = CodeMatmul(kind.weight(128, 512, CPU))
    tensors = [one for one in (matmul.codes, matmul.scales, matmul.offsets) if one is not None]
    assert kind.num_bytes(128, 512) == sum(one.nbytes for one in tensors)


MIXTURES = {
    "Mixtral-8x7B": {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "vocab_size": 32000,
                     "intermediate_size": 14336, "num_local_experts": 8, "num_experts_per_tok": 2},
    "Qwen3-30B-A3B": {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 151936,
                      "hidden_size": 2048, "num_hidden_layers": 48, "num_key_value_heads": 4,
                      "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8},
}  # fmt: skip


@pytest.mark.parametrize(
    "name, total, active, reached",
    [("Mixtral-8x7B", 46.7, 12.9, [2.0, 7.92, 8.0]), ("Qwen3-30B-A3B", 30.5, 3.35, [8.0, 82.4, 126.0])],
)
def test_of_a_mixture_only_experts_that_tokens_reach_count(name, total, active, reached):
    """Parameters in billions as published; experts that 1, 16 and 64 tokens reach."""
    model = model_config({**shapes.CONFIGS[LLAMA], **shapes.COMMON, **MIXTURES[name]})
    bounds = Bounds(model, H100)
    assert model.num_parameters() / 1e9 == pytest.approx(total, abs=0.06)
    assert (bounds.active_parameters + 2 * bounds.head_parameters) / 1e9 == pytest.approx(active, abs=0.05)
    expert = 3 * model.hidden_size * model.moe.intermediate_size * model.num_layers
    fixed = bounds.active_parameters + bounds.head_parameters - model.moe.experts_per_token * expert
    read = [(bounds.weight_bytes(n) / 2 - fixed) / expert for n in (1, 16, 64)]
    assert read == pytest.approx(reached, rel=1e-2)
    assert bounds.weight_bytes(10**6) == (bounds.body_parameters + bounds.head_parameters) * 2
    step = bounds.decode_seconds(1, 1024)
    assert step == pytest.approx((fixed + model.moe.experts_per_token * expert) * 2 / H100.bandwidth, rel=0.1)
    assert bounds.prefill_flops(1024) < 2.3 * 1024 * bounds.active_parameters


def test_decode_steps_shrink_as_requests_end():
    assert list(decode_steps([(10, 3), (20, 1), (30, 2)])) == [(2, 10 + 30 + 2), (1, 10 + 2)]
    assert list(decode_steps([(10, 1)])) == []


def test_every_id_of_a_model_has_a_text(models):
    tokenizer = shapes.word_tokenizer(600)
    assert tokenizer.get_vocab_size() == 600
    assert tokenizer.decode(tokenizer.encode("héllo").ids) == "héllo"
    assert all(tokenizer.decode([i]) for i in range(256, 600))


# The record.


def test_a_case_that_raises_costs_itself_only(tmp_path):
    path = tmp_path / "part.jsonl"
    recorder = Recorder(path)
    recorder.case("good", lambda: recorder.figure("a", 1.0, "ms", goal=at_most(2)))
    recorder.case("bad", lambda: 1 / 0)
    recorder.case(
        "outer", lambda: recorder.case("inner", lambda: recorder.figure("b", 2.0, "ms", share=0.5, of="copy"))
    )
    lines = read_record(path)
    assert [line["kind"] for line in lines] == "begin figure end begin failed begin begin figure end end".split()
    assert "ZeroDivisionError: division by zero (test_gpu_check.py" in lines[4]["reason"]
    assert lines[1]["met"] and lines[1]["by"] == pytest.approx(1.0)


DYING_PART = """
import os, sys, time
from pathlib import Path
from benchmarks.gpu_check.record import Recorder
recorder = Recorder(Path(sys.argv[1]), "it died")
recorder.case("first", lambda: recorder.figure("first", 1.0, "ms"))
recorder.case("kills", lambda: os._exit(7))
recorder.case("hangs", lambda: time.sleep(600), seconds=0.3)
recorder.case("last", lambda: recorder.figure("last", 2.0, "ms"))
"""


def test_a_process_goes_on_behind_the_case_that_killed_or_hung_the_one_before(tmp_path):
    path = tmp_path / "part.jsonl"
    start = partial(subprocess.run, [sys.executable, "-c", DYING_PART, str(path)], cwd=ROOT, capture_output=True)
    assert [start().returncode for _ in range(3)] == [7, 1, 0]
    lines = read_record(path)
    assert [line["name"] for line in lines if line["kind"] == "figure"] == ["first", "last"]
    assert [line["case"] for line in lines if line["kind"] == "failed"] == ["kills", "hangs"]


def test_half_a_line_is_no_line(tmp_path):
    path = tmp_path / "part.jsonl"
    path.write_text('{"kind": "end", "case": "a"}\n{"kind": "fig')
    assert read_record(path) == [{"kind": "end", "case": "a"}]


@pytest.mark.parametrize("goal, value, share, met, by", [
    (at_least(0.8, "share"), 1.0, 0.9, True, 0.125), (at_least(0.8, "share"), 1.0, 0.6, False, 0.25),
    (at_most(2.0), 4.0, None, False, 0.5), (at_most(2.0), 1.0, None, True, 1.0),
    (at_least(1.0, "share"), 3.0, 1.0, True, 0.0), (at_least(1.0), float("nan"), None, False, None),
])  # fmt: skip
def test_goals(goal, value, share, met, by):
    judged = goal.judge(value, share)
    assert judged["met"] is met and judged["by"] == (None if by is None else pytest.approx(by))


# The command.


def check(tmp_path, *arguments):
    options = command.option_parser().parse_args(
        ["--tiny", "--json", str(tmp_path), "--log", str(tmp_path / "log"), *arguments]
    )
    return command.Check(options, tmp_path)


def test_a_part_that_dies_is_started_again_while_it_gets_on(tmp_path, monkeypatch):
    run, statuses = check(tmp_path), [3, -11, 0]

    def start(part, until, lost):
        Recorder(tmp_path / "limits.jsonl", lost).skip("progress", lost)
        return statuses.pop(0)

    monkeypatch.setattr(run, "start_part", start)
    run.run_part(parts.PARTS[0], 100.0)
    reasons = [line["reason"] for line in run.records["limits"]]
    assert reasons == ["", "the device failed", "the process was ended by SIGSEGV"] and not statuses


def test_a_part_that_does_not_get_on_is_given_up_with_the_end_of_its_log(tmp_path, monkeypatch):
    run = check(tmp_path)
    run.log_path.write_text("ImportError: no such thing\n")
    monkeypatch.setattr(run, "start_part", lambda part, until, lost: 1)
    run.run_part(parts.PARTS[0], 100.0)
    (line,) = [line for line in run.records["limits"] if line["kind"] == "failed"]
    assert line["case"] == "the part limits" and "ImportError: no such thing" in line["reason"]


def test_a_part_that_hangs_is_killed_and_named(tmp_path, monkeypatch):
    run = check(tmp_path)
    monkeypatch.setattr(sys, "executable", "/bin/sleep")  # sleep -m: ends at once with an error
    assert run.start_part(parts.PARTS[0], 0.0, "") in (1, None)
    monkeypatch.setattr(run, "start_part", lambda part, until, lost: None)
    run.run_part(parts.PARTS[0], command.MIN_SECONDS)
    assert "the time of the part limits ran out" in run.records["limits"][-1]["reason"]


def test_the_limits_may_take_from_the_parts_behind_them(tmp_path, monkeypatch):
    """Without them no other figure has a share; the first import of torch on a new machine may take a minute."""
    given = {}
    monkeypatch.setattr(command.Check, "run_part", lambda self, part, seconds: given.update({part.name: seconds}))
    assert command.main(["--tiny", "--json", str(tmp_path), "--log", str(tmp_path / "log")]) == 0
    later = sum(part.seconds for part in parts.select(parts.DEFAULT)[2:])
    assert given["limits"] == 150 and given["decode"] == pytest.approx(command.SECONDS - later, abs=5)
    assert "tiles" not in given


def test_children_of_a_part_are_asked_to_end_before_they_are_killed(tmp_path):
    script = f"trap 'touch {tmp_path}/asked; exit 0' TERM; touch {tmp_path}/ready; while :; do sleep 0.05; done"
    process = subprocess.Popen(["/bin/sh", "-c", script], start_new_session=True)
    while not (tmp_path / "ready").exists():
        time.sleep(0.01)
    command.end_group(process)
    assert process.returncode == 0 and (tmp_path / "asked").exists()
    command.end_group(process)  # one that is gone


def test_a_part_that_ignores_the_request_is_killed(monkeypatch):
    monkeypatch.setattr(command, "GRACE_SECONDS", 0.2)
    script = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"
    process = subprocess.Popen([sys.executable, "-c", script], start_new_session=True, stdout=subprocess.PIPE)
    process.stdout.readline()
    command.end_group(process)
    assert process.returncode == -signal.SIGKILL
    process.stdout.close()


def test_a_load_generator_that_takes_too_long_is_asked_to_end():
    with pytest.raises(subprocess.TimeoutExpired):
        http.run_for(["sleep", "60"], 0.05)
    assert http.run_for(["false"], 60) == 1


def test_missing_packages_are_named_and_skip_the_part(tmp_path, monkeypatch):
    run = check(tmp_path)
    monkeypatch.setattr(parts.importlib.util, "find_spec", lambda name: None if name == "msgspec" else object())
    run.run_part(next(part for part in parts.PARTS if part.name == "serving"), 100.0)
    (line,) = run.records["serving"]
    assert line["kind"] == "skipped" and line["reason"].startswith("msgspec missing (make gpu-wheels")


def test_parts_by_name():
    assert [part.name for part in parts.select(["decode"])] == ["limits", "decode"]
    with pytest.raises(ValueError, match="there is no part stepps; there are limits, decode"):
        parts.select(["stepps"])
    assert sum(part.seconds for part in parts.select(parts.DEFAULT)) <= command.SECONDS < 600
    assert command.main(["--parts", "nonsense"]) == 2


def test_the_make_target_needs_no_environment_of_ours():
    dry = partial(subprocess.run, cwd=ROOT, capture_output=True, text=True, check=True)
    done = dry(["make", "--no-print-directory", "--dry-run", "gpu-check", "PYTHON=python9", "PARTS=kernels", "ARGS="])
    assert (
        done.stdout.split()
        == "exec python9 -m benchmarks.gpu_check --parts kernels".replace("kernels", '"kernels"').split()
    )
    assert "/.gpu-wheels/" in (ROOT / ".gitignore").read_text()


def test_the_command_itself_needs_nothing_but_python():
    script = (
        "import benchmarks.gpu_check.__main__, sys; print(sorted({'torch', 'numpy', 'msgspec'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_one_wheel_per_distribution():
    names = ["msgspec-0.9.0-cp312-x.whl", "msgspec-0.22.0-cp312-x.whl", "fastapi-0.165.0-py3-none-any.whl"]
    assert [path.name for path in wheels.newest(map(Path, names))] == [names[2], names[1]]


# The parts that need a GPU, as far as they run without one.


class FakeEvent:
    """Two microseconds pass at every record."""

    clock = 0.0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        FakeEvent.clock += 0.002
        self.time = FakeEvent.clock

    def elapsed_time(self, end):
        return end.time - self.time


def test_events_around_cold_runs(monkeypatch):
    for name, value in {"Event": FakeEvent, "_sleep": lambda cycles: None, "synchronize": lambda device: None}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(timing, "flush_buffer", lambda device: torch.ones(8))
    watch, calls = timing.Stopwatch(torch.device("cuda"), seconds=0.0), []
    assert watch.median(lambda: calls.append(1)) == pytest.approx(2e-6)
    assert len(calls) == 3 + timing.MIN_RUNS


def test_without_a_gpu_the_real_thing_says_so():
    with pytest.raises(RuntimeError, match="finds no CUDA GPU"):
        timing.pick_device(tiny=False)


def test_the_card_is_read_from_nvidia_smi(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\necho "NVIDIA H100 80GB HBM3, 580.1, 75000, 81559, 1980, 2619, 350.00, 41"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(card.importlib.util, "find_spec", lambda name: None)
    assert card.memory_in_use() == (75000 << 20, 81559 << 20)
    name = report.file_name(card.card_facts()["name"], tiny=False)
    assert name.endswith("-gpu-check-nvidia-h100-80gb-hbm3.json")


def test_a_driver_that_does_not_answer_costs_the_facts_of_the_card_only(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(card, "NVIDIA_SMI_SECONDS", 0.2)
    assert card.card_facts() == {}


@pytest.mark.parametrize("used, met", [(75, False), (93, True)])
async def test_the_memory_of_the_card_is_judged(tmp_path, monkeypatch, used, met):
    monkeypatch.setattr(serving, "memory_in_use", lambda: (used << 30, 100 << 30))
    config = SimpleNamespace(gpu_memory_utilization=0.9)
    model = SimpleNamespace(num_blocks=7, memory={"weights": 5})
    recorder = Recorder(tmp_path / "part.jsonl")
    setting, driver = parts.Setting(True, tmp_path), SimpleNamespace(config=config, model=model)
    bench = serving.EngineBench(recorder, setting, driver, None)
    await bench.memory("when ready")
    await bench.memory(serving.IN_USE, serving.MEMORY_GOAL)
    ready, at_work = read_record(tmp_path / "part.jsonl")
    assert ready["value"] == at_work["value"] == pytest.approx(used) and "met" not in ready and at_work["met"] is met
    assert at_work["detail"]["num_blocks"] == 7 and at_work["detail"]["parts"] == {"weights": 5}


def test_the_engine_is_given_more_than_the_goal_of_the_card(tmp_path):
    """torch counts up to 1 % less of a card than NVIDIA does, and no workload takes all that was profiled."""
    config = serving.serving_config(tmp_path, "cuda", False)
    assert config.gpu_memory_utilization >= (serving.MEMORY_GOAL.least + 3) / 100
    assert config.num_blocks is None and config.device == "cuda" and config.load_format == "dummy"


def test_a_trace_becomes_kinds_gaps_and_the_longest_kernels():
    def event(ts, dur, name, cat="kernel"):
        return {"ts": ts, "dur": dur, "name": name, "cat": cat}

    events = [
        event(0, 10, "paged_attention_kernel"), event(20, 30, "void cutlass::Kernel2<gemm>(Params)"),
        event(40, 20, "reduce_chunks_kernel"), event(90, 10, "Memcpy DtoH", "gpu_memcpy"),
        event(0, 500, "aten::mm", "cpu_op"), {"name": "process_name", "ph": "M"},
    ]  # fmt: skip
    rows = {row.name: row for row in profile.summarize(events, profile.DEVICE_EVENTS, 2)}
    assert rows["attention"].microseconds == 15 and rows["attention"].launches == 1
    assert rows["GEMM"].share == pytest.approx(0.3) and rows["copies"].microseconds == 5
    assert rows["gaps, device idle"].microseconds == (100 - 10 - 40 - 10) / 2
    assert rows["kernel Kernel2"].microseconds == 15
    assert profile.summarize([], profile.DEVICE_EVENTS, 2) == []


@pytest.mark.parametrize("name, kind", [
    ("nvjet_tst_128x256_64x4_h_bz_coopA_NTT", "GEMM"), ("quantize_and_cache_kernel", "cache writes"),
    ("void at::native::vectorized_elementwise_kernel<4>", "other"), ("flash_fwd_splitkv_kernel", "attention"),
])  # fmt: skip
def test_kinds_of_kernels(name, kind):
    assert profile.kind(name) == kind


def test_goals_of_attention(monkeypatch):
    shape = kernels.TINY_SHAPE
    goal = kernels.attention_goal(decode_case(shape, CPU, 2, 16), CPU)
    assert goal is None
    monkeypatch.setattr(kernels, "DECODE_GOAL_TOKENS", 256)
    assert kernels.attention_goal(decode_case(shape, CPU, 16, 16), CPU).least == 0.95
    monkeypatch.setattr(kernels, "PREFILL_GOAL_TOKENS", 16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    case = prefill_case(shape, CPU, 1, 16, 16)
    goal = kernels.attention_goal(case, torch.device("cuda"))
    assert goal.judge(case.flops / 400e12 * 1e6, None)["met"] and not goal.judge(case.flops / 300e12 * 1e6, None)["met"]


def test_bytes_and_flops_of_experts():
    """Two tokens that go to experts 0 and 2 of four."""
    layer = MoELayer.random(MoEShape("m", 4, 2, 32, 24, shards=3), CPU)
    case = moe_case(layer, torch.ones(2, 32).bfloat16(), torch.tensor([[9, 1, 8, 2], [3, 0, 4, 1]]).bfloat16())
    expert = 3 * 32 * 8
    assert case.num_bytes == 2 * (2 * expert + 2 * 2 * 32 + 8) and case.flops == 2 * 4 * expert


@pytest.mark.parametrize("product", [moe.grouped, moe.loop])
def test_torchs_own_experts_are_ours(product):
    torch.manual_seed(0)  # without equal logits: torch's topk may choose another expert than a kernel
    layer = MoELayer.random(MoEShape("m", 7, 3, 64, 48), CPU)
    x, logits = layer.inputs(5)  # some expert has no token
    logits[:, 4] = -100.0
    ours = layer.experts(x, moe.route(logits, moe.RoutingRule(3, True))).float()
    theirs = moe.torch_experts(product, layer, x, logits).float()
    assert (ours - theirs).norm() < 0.02 * theirs.norm()


def test_without_a_grouped_product_experts_are_looped_over(monkeypatch):
    layer = MoELayer.random(MoEShape("m", 2, 1, 16, 16), CPU)
    assert moe.grouped_product(layer) == ("grouped_mm", moe.grouped)
    monkeypatch.delattr(torch, "_grouped_mm")
    assert moe.grouped_product(layer) == ("expert loop", moe.loop)


def test_a_case_that_cannot_be_made_costs_the_rest_of_its_series_only(tmp_path):
    recorder = Recorder(tmp_path / "part.jsonl")
    bench = Bench(recorder, CPU, timing.Stopwatch(CPU), H100)

    def cases():
        yield decode_case(kernels.TINY_SHAPE, CPU, 1, 16)
        raise MemoryError("no room")

    bench.series("rows", cases())
    lines = read_record(tmp_path / "part.jsonl")
    assert [line["kind"] for line in lines] == ["begin", "figure", "end", "begin", "failed"]
    assert "no room" in lines[-1]["reason"]


# Results.


def test_tests_end_before_their_process_so_that_passed_ones_are_counted(tmp_path, monkeypatch):
    passed = json.dumps({"test": "tests/kernels/x", "outcome": "passed", "message": ""})
    (tmp_path / "tests-results.jsonl").write_text(passed + "\n")
    monkeypatch.setattr(tests, "pytest_command", lambda files, setting: ["sleep", "60"])
    setting = parts.Setting(True, tmp_path, time.monotonic() + tests.SPARE_SECONDS + 0.5)
    with pytest.raises(RuntimeError, match="not done within"):
        tests.run_tests([], Recorder(tmp_path / "tests.jsonl"), setting)
    (figure,) = [line for line in read_record(tmp_path / "tests.jsonl") if line["kind"] == "figure"]
    assert figure["name"] == "tests: kernels" and figure["value"] == 1


def test_outcomes_of_pytest_count_setup_and_teardown(tmp_path):
    passed, failed = {"outcome": "passed", "message": ""}, {"outcome": "failed", "message": "boom"}
    lines = [{"test": "tests/kernels/a.py::x", **passed}, {"test": "tests/kernels/a.py::x", **failed},
             {"test": "tests/kernels/a.py::y", **passed}]  # fmt: skip
    recorder = Recorder(tmp_path / "part.jsonl")
    tests.report("kernels", tests.by_test(lines), recorder)
    figure, failure = read_record(tmp_path / "part.jsonl")
    assert figure["value"] == 1 and figure["share"] == 0.5 and not figure["met"]
    assert failure["name"] == "FAILED tests/kernels/a.py::x" and failure["reason"] == "boom"


def test_speed_against_transformers_is_judged_across_parts():
    def record(name, value):
        return [{"kind": "figure", "name": name, "value": value, "unit": "tok/s", "share": None, "of": ""}]

    records = {"serving": record(NANO, 10_000.0),
               "peers": record("Qwen3-0.6B: transformers one by one", 500.0)}  # fmt: skip
    (line,) = report.with_ratios(records)["ratios"]
    assert line["value"] == 20 and not line["met"] and line["by"] == pytest.approx(1 / 6)
    assert report.with_ratios({"limits": []}) == {"limits": []}
    assert "20.0 x" in "\n".join(report.table(report.with_ratios(records)))


def test_timelines_and_percentiles():
    line = Timeline(1.0, [1.5, 1.75, 2.75], [1, 2, 1])
    assert (line.first, line.total, line.gaps) == (0.5, 1.75, [0.25, 1.0])
    assert [percentile([4.0, 1.0, 3.0, 2.0], p) for p in (1, 50, 75, 99, 100)] == [1, 2, 3, 4, 4]
