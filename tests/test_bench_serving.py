"""The benchmark's judgement, its reading of bench_serving's results, and its yardsticks' models."""

import json
import math
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from sglang_dsv4.bench import workloads
from sglang_dsv4.bench.__main__ import BASELINE, main
from sglang_dsv4.bench.compare import METRICS, Run, Sides, Verdict, compare, failed, table
from sglang_dsv4.bench.workloads import RANDOM, SHARED_PREFIX, WORKLOADS, best, extract
from sglang_dsv4.bench.yardstick import STOCK_CONFIG, YARDSTICK, make_stock_model
from sglang_dsv4.demo.__main__ import MODEL_DIR
from sglang_dsv4.demo.server import ServerError
from sglang_dsv4.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent
OURS = {"throughput": 300.0, "ttft": 900.0, "tpot": 50.0, "cpu": 3.0}
STOCK = {"throughput": 200.0, "ttft": 1000.0, "tpot": 100.0, "cpu": 1.5}


def a_run(ours=OURS, stock=STOCK, options=("--num-prompts", "8"), **fields) -> Run:
    common = {"threads": 1, "yardstick": "y", "machine": "m", "versions": {"torch": "2"}}
    return Run({"random": Sides(options, ours, stock)}, **(common | fields))


def times(values, metric, factor):
    return values | {metric.name: values[metric.name] * factor}


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_a_regression_beyond_the_tolerance_fails_and_one_within_it_passes(metric):
    def verdicts(worse):
        factor = 1 / worse if metric.higher_is_better else worse
        rows = compare(a_run(times(OURS, metric, factor)), a_run())
        return {row.metric.name: row.verdict for row in rows}, failed(rows)

    inside, inside_fails = verdicts(metric.tolerance * 0.99)
    beyond, beyond_fails = verdicts(metric.tolerance * 1.01)
    better, better_fails = verdicts(1 / (metric.tolerance * 1.01))
    others = {other.name: Verdict.OK for other in METRICS}
    assert (inside, inside_fails) == (others, False)
    assert (beyond, beyond_fails) == (others | {metric.name: Verdict.REGRESSION}, True)
    assert (better, better_fails) == (others | {metric.name: Verdict.BETTER}, False)


def test_a_slower_machine_is_no_regression():
    """Half the speed on both sides leaves every ratio."""
    slow = {m.name: 0.5 if m.higher_is_better else 2.0 for m in METRICS}
    ours = {name: OURS[name] * slow[name] for name in OURS}
    stock = {name: STOCK[name] * slow[name] for name in STOCK}
    rows = compare(a_run(ours, stock), a_run())
    assert [row.change for row in rows] == pytest.approx([1.0] * len(METRICS))
    assert not failed(rows)


def test_a_number_that_is_not_one_is_no_pass():
    rows = compare(a_run(OURS | {"tpot": math.nan}), a_run())
    assert {row.metric.name for row in rows if row.verdict is Verdict.REGRESSION} == {"tpot"}
    assert failed(rows)


def test_a_missing_baseline_is_no_pass():
    assert failed(compare(a_run(), None))
    another = replace(a_run(), workloads={"other": a_run().workloads["random"]})
    rows = compare(a_run(), another)
    assert {row.verdict for row in rows} == {Verdict.NO_BASELINE}
    assert failed(rows)


@pytest.mark.parametrize(
    "change",
    [{"threads": 2}, {"yardstick": "z"}, {"options": ("--num-prompts", "9")}],
    ids=lambda change: next(iter(change)),
)
def test_a_baseline_of_other_settings_is_refused(change):
    with pytest.raises(ConfigError, match=f"{next(iter(change))}.*--update-baseline"):
        compare(a_run(), a_run(**change))


def test_another_machine_or_version_is_compared():
    other = a_run(machine="n", versions={"torch": "3"})
    assert not failed(compare(a_run(), other))


def test_a_run_survives_its_file(tmp_path):
    path = tmp_path / "folder" / "run.json"
    a_run().save(path, runs={"ours": {"random": [OURS, OURS]}})
    assert Run.load(path) == a_run()
    assert json.loads(path.read_text())["runs"]["ours"]["random"] == [OURS, OURS]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 0}', '{"format": 1}'])
def test_a_damaged_baseline_is_one_sentence_and_status_2_before_anything_runs(
    text, tmp_path, capsys, monkeypatch
):
    path = tmp_path / "base.json"
    path.write_text(text)
    monkeypatch.setattr("sglang_dsv4.bench.__main__.benchmark", pytest.fail)
    assert main(["--baseline", str(path), "--results", str(tmp_path)]) == 2
    assert str(path) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("baseline", "status"), [(OURS, 0), (times(OURS, METRICS[-1], 0.5), 1), (None, 1)]
)
def test_the_exit_status_and_the_result_file(baseline, status, tmp_path, monkeypatch, capsys):
    runs = {"ours": {"random": [OURS]}, "stock": {"random": [STOCK]}}
    monkeypatch.setattr("sglang_dsv4.bench.__main__.benchmark", lambda *_: (a_run(), runs))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    path = tmp_path / "base.json"
    if baseline:
        a_run(baseline).save(path)
    arguments = ["--baseline", str(path), "--results", str(tmp_path / "results")]
    assert main(arguments) == status
    (result,) = (tmp_path / "results").glob("*.json")
    assert Run.load(result) == a_run()
    assert json.loads(result.read_text())["runs"] == runs
    assert ("is missing" in capsys.readouterr().out) is (baseline is None)
    if status:
        assert main([*arguments, "--update-baseline"]) == 0
        assert main(arguments) == 0


def test_the_table_shows_ratios_limits_and_verdicts():
    metric = METRICS[0]
    lines = table(compare(a_run(times(OURS, metric, 0.25)), a_run())).splitlines()
    assert len(lines) == 1 + len(METRICS)
    assert lines[1].split()[:2] == ["random", "tokens/s"]
    assert "0.375" in lines[1]  # 75 / 200
    assert "1.500" in lines[1]  # 300 / 200
    assert f"4.00 (<{metric.tolerance:g})" in lines[1]
    assert lines[1].endswith("REGRESSION")
    assert lines[2].endswith("ok")
    assert "NO BASELINE" in table(compare(a_run(), None))


RESULT = {
    "completed": RANDOM.requests,
    "total_input_tokens": 3000,
    "total_output_tokens": 1000,
    "total_throughput": 321.0,
    "median_ttft_ms": 900.0,
    "median_tpot_ms": 50.0,
}


def test_metrics_are_read_from_the_result_of_bench_serving():
    wanted = {"throughput": 321.0, "ttft": 900.0, "tpot": 50.0, "cpu": 2.0}
    assert extract(RESULT, RANDOM, cpu=8.0) == wanted


@pytest.mark.parametrize(
    ("change", "found"),
    [({"completed": RANDOM.requests - 1}, "completed"), ({"median_ttft_ms": 0.0}, "TTFT")],
)
def test_failed_requests_and_missing_times_are_errors(change, found):
    with pytest.raises(ServerError, match=found):
        extract(RESULT | change, RANDOM, cpu=8.0)


def test_the_best_run_is_the_highest_throughput_and_the_lowest_times():
    assert best([OURS, STOCK]) == {"throughput": 300.0, "ttft": 900.0, "tpot": 50.0, "cpu": 1.5}


def test_cpu_seconds_count_children():
    burn = "import time\nwhile time.process_time() < 0.5: pass\n"
    parent = (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', {burn + 'time.sleep(60)'!r}])\n"
        "print(flush=True)\ntime.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE)
    try:
        process.stdout.readline()
        deadline = time.monotonic() + 60
        while workloads.cpu_seconds(process.pid) < 0.5 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert workloads.cpu_seconds(process.pid) >= 0.5
        own = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        assert (int(own[11]) + int(own[12])) / 100 < 0.5
    finally:
        for child in workloads.psutil.Process(process.pid).children():
            child.kill()
        process.kill()
        process.wait()


def test_prompts_fit_both_models_and_share_whole_pages():
    for workload in WORKLOADS:
        pairs = zip(workload.options, workload.options[1:], strict=False)
        lengths = [int(value) for option, value in pairs if option.endswith("-len")]
        assert 0 < sum(lengths) < STOCK_CONFIG["n_positions"]
    position = SHARED_PREFIX.options.index("--gsp-system-prompt-len")
    assert int(SHARED_PREFIX.options[position + 1]) % 256 == 0


def test_the_stock_model_has_our_tokenizer(tmp_path):
    make_stock_model(tmp_path, MODEL_DIR)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"config.json", "tokenizer.json", "tokenizer_config.json"}
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [
        "GPT2LMHeadModel"
    ]
    ours = json.loads((MODEL_DIR / "config.json").read_text())
    assert STOCK_CONFIG["vocab_size"] == ours["vocab_size"]


def test_the_stored_baseline_is_of_the_workloads_as_they_are():
    baseline = Run.load(ROOT / BASELINE)
    assert baseline.yardstick == YARDSTICK
    assert {name: sides.options for name, sides in baseline.workloads.items()} == {
        workload.name: workload.options for workload in WORKLOADS
    }
    assert not failed(compare(baseline, baseline))


def test_the_script_prints_its_usage_without_installing():
    script = ROOT / "launch" / "bench_serving.sh"
    done = subprocess.run(
        ["bash", str(script), "--help"], capture_output=True, text=True, timeout=60, check=True
    )
    assert "usage: bash launch/bench_serving.sh" in done.stdout
    assert "--update-baseline" in done.stdout
