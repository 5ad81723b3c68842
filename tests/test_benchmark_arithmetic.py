"""The arithmetic and the method of the benchmarks; never speed, which a shared machine cannot promise."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from multihead.bench import ceilings, measure
from multihead.bench.cases import CAUSAL, FULL, OPENVINO, OURS_FP32, SDPA, Attend, Layer, Mask, Train, goal
from multihead.bench.ceilings import Ceilings, measure_ceilings, working_set
from multihead.bench.generation import Step, Whole
from multihead.bench.table import CASES, HALF_GOALS, SINGLE, select

TINY = Attend(1, 2, 2, 5, 7, 3, CAUSAL, "all sizes distinct")
STEADY = [1.0] * 100


class Scripted:
    """A contender whose calls take as long as it is told, by a clock of its own."""

    detail = ""

    def __init__(self, name, each, log, rest=0.0):
        self.name, self.each, self.log, self.rest = name, each, log, rest

    def seconds(self, calls):
        self.log.append((self.name, calls))
        return calls * self.each


# Statistics


def test_the_median_ratio_and_its_interval_are_those_of_the_blocks():
    noise = random.Random(1)
    blocks = []
    for _ in range(60):
        a, b = (1 + noise.gauss(0, 0.02) for _ in range(2))
        blocks.append(([a, a], [1.5 * b, 1.5 * b]))
    found = measure.summarise(blocks, STEADY[:61])
    assert found.ratio == measure.median(found.ratios)
    assert found.low < 1.5 < found.high
    assert found.low < found.ratio < found.high
    assert found.high - found.low < 0.05
    assert (found.blocks, found.rejected, found.note) == (60, 0, "")


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    noise = random.Random(2)
    trials = 300
    covered = 0
    for seed in range(trials):
        low, high = measure.bootstrap_interval([noise.lognormvariate(0, 0.1) for _ in range(25)], seed, resamples=500)
        covered += low <= 1 <= high
    assert 0.90 <= covered / trials <= 0.99


def test_the_interval_is_the_same_for_the_same_seed():
    values = [1.0, 1.1, 0.9, 1.3, 1.05]
    assert measure.bootstrap_interval(values, 3) == measure.bootstrap_interval(values, 3)


def test_steady_drift_within_a_block_cancels():
    blocks = [([t, t + 3], [t + 1, t + 2]) for t in (10.0, 20.0, 40.0, 80.0, 160.0)]
    assert measure.summarise(blocks, STEADY[:6]).ratio == 1.0


def test_one_spike_moves_neither_the_median_nor_the_best():
    blocks = [([1.0, 1.0], [2.0, 2.0])] * 9 + [([1.0, 1.0], [50.0, 2.0])]
    found = measure.summarise(blocks, STEADY[:11])
    assert (found.ratio, found.min_ratio, found.b_seconds) == (2.0, 2.0, 2.0)


# Blocks


def test_every_block_is_balanced_and_both_orders_come_up():
    drawn = measure.orders(50, seed=0)
    assert set(drawn) == {"abba", "baab"}
    assert drawn == measure.orders(50, seed=0) != measure.orders(50, seed=1)


def test_blocks_in_which_the_clock_moved_are_left_out():
    readings = [1.0] * 10 + [1.04] + [1.0] * 10  # between blocks 9 and 10
    kept, note = measure.steady(readings)
    assert kept == [i for i in range(20) if i not in (9, 10)]
    assert note == ""
    blocks = [([1.0, 1.0], [2.0, 2.0])] * 9 + [([1.0, 1.0], [9.0, 9.0])] * 2 + [([1.0, 1.0], [2.0, 2.0])] * 9
    assert measure.summarise(blocks, readings).rejected == 2


def test_a_restless_machine_keeps_its_steadiest_blocks_and_says_so():
    readings = [1.0 + 0.1 * i for i in range(31)]
    kept, note = measure.steady(readings)
    assert len(kept) == 15
    assert kept == list(range(min(kept), max(kept) + 1))  # around the usual clock
    assert "restless clock: 0 of 30 blocks steady, kept 15" in note


def test_a_restless_machine_keeps_nine_blocks_at_least():
    kept, note = measure.steady([1.0 + 0.1 * i for i in range(12)])
    assert len(kept) == measure.FEWEST_KEPT == 9
    assert "kept 9" in note
    assert measure.steady([1.0, 1.5, 2.0])[0] == [0, 1], "where there are fewer, all of them"


@pytest.mark.parametrize(
    ("readings", "times"),
    [
        (lambda n: 1.0, 1),
        (lambda n: 1.0 + n % 2, 2),
        (lambda n: 1.0 + n % 2 * (n < measure.FEWEST_BLOCKS), None),
    ],
    ids=["steady", "never", "later"],
)
def test_a_restless_clock_gets_more_blocks_and_twice_as_many_at_most(monkeypatch, readings, times):
    taken = []
    monkeypatch.setattr(measure, "clock_reading", lambda: taken.append(0) or readings(len(taken) - 1))
    found = measure.compare(Scripted("a", 0.06, []), Scripted("b", 0.12, []), seconds=1e-3)
    few = measure.FEWEST_BLOCKS
    if times is None:
        assert few < found.blocks < measure.AT_LONGEST * few
        assert found.note == ""
    else:
        assert found.blocks == times * few
        assert bool(found.note) == (times > 1)


def test_openvino_gets_the_longest_rest():
    from multihead.bench.peers.runtimes import RESTS

    assert RESTS[OPENVINO] == max(RESTS.values()) >= 0.2


def test_the_number_of_blocks_stays_within_bounds():
    assert measure.count_blocks(1e-9, 1.0, 0.05) == measure.FEWEST_BLOCKS
    assert measure.count_blocks(1e9, 0.01, 0) == measure.MOST_BLOCKS
    assert measure.count_blocks(10, 0.125, 0.1) == 20
    assert measure.count_blocks(1, measure.PATIENCE / 10, 0) == 5  # of a slow one as many as patience lasts for
    assert measure.count_blocks(1, measure.PATIENCE, 0) == measure.FEWEST_OF_ALL


def test_a_slow_contender_gets_few_blocks_even_on_a_restless_machine_and_the_result_says_so(monkeypatch):
    readings = iter(x for _ in range(100) for x in (1.0, 1.5))
    monkeypatch.setattr(measure, "clock_reading", lambda: next(readings))
    calls = []
    found = measure.compare(Scripted("a", 1.0, calls), Scripted("b", measure.PATIENCE, calls), seconds=1)
    assert found.blocks == measure.FEWEST_OF_ALL
    assert found.ratio == pytest.approx(measure.PATIENCE)
    assert "slow: 3 blocks" in found.note


def test_contenders_alternate_and_rest_only_when_hands_change(monkeypatch):
    log = []
    monkeypatch.setattr(measure, "clock_reading", lambda: 1.0)
    monkeypatch.setattr(measure.time, "sleep", lambda seconds: log.append(("rest", seconds)))
    a, b = Scripted("a", 0.06, log), Scripted("b", 0.12, log, rest=0.05)
    found = measure.compare(a, b, seconds=1e-3, seed=4)
    timed = [name for name, calls in log[log.index(("b", 1)) + 2 :] if name != "rest" and calls]
    assert "".join(timed) == "".join(measure.orders(measure.FEWEST_BLOCKS, 4))
    assert {seconds for name, seconds in log if name == "rest"} == {0.05}
    for before, (name, _) in pairwise(log):
        if name != "rest" and before[0] != "rest":
            assert before[0] == name
    assert found.ratio == pytest.approx(2.0)
    assert (found.a_seconds, found.b_seconds) == pytest.approx((0.06, 0.12))


def test_short_calls_share_a_slot_and_warm_up_long_ones_do_neither():
    short, long = (measure.find_pace(Scripted("a", each, []), 0.0) for each in (1e-5, 0.2))
    assert short.calls * 1e-5 == pytest.approx(measure.SLOT)
    assert short.warm_up > 0
    assert (long.calls, long.warm_up) == (1, 0)


def test_a_contender_that_fails_leaves_the_collector_on():
    def fail():
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        measure.compare(measure.Local("a", fail), measure.Local("b", fail), seconds=1)
    assert measure.gc.isenabled()


# Cases and ceilings


@pytest.mark.parametrize(
    "mask",
    [FULL, CAUSAL, Mask(causal=True, window=3), Mask(documents=(2, 5, 4)), Mask(causal=True, documents=(2, 5, 4))],
    ids=lambda mask: mask.label,
)
def test_useful_work_is_the_visible_pairs(mask):
    N = 11
    document = [i for i, length in enumerate(mask.documents or (N,)) for _ in range(length)]
    visible = sum(
        document[q] == document[k] and (not mask.causal or k <= q) and (not mask.window or k > q - mask.window)
        for q in range(N)
        for k in range(N)
    )
    assert mask.pairs(N, N) == visible
    assert Attend(2, 3, 3, N, N, 5, mask, "").flops == 4 * 2 * 3 * visible * 5


def test_causal_counts_half_and_a_window_a_sliver():
    full, causal = (Attend(1, 8, 8, 2048, 2048, 64, mask, "").flops for mask in (FULL, CAUSAL))
    assert causal / full == pytest.approx(0.5, abs=1e-3)
    assert Mask(causal=True, window=256).pairs(8192, 8192) == 8192 * 256 - 256 * 255 // 2
    assert CAUSAL.pairs(3, 5) == 3 + 4 + 5  # the last query sees the last key


def test_decode_is_bound_by_reading_keys_and_values_and_prefill_by_products():
    decode, prefill = Attend(1, 32, 8, 1, 4096, 128, FULL, ""), Attend(1, 8, 8, 2048, 2048, 128, FULL, "")
    ceilings = Ceilings({"fp32": 300e9, "bf16": 600e9}, {working_set(c): 50e9 for c in (decode, prefill)})
    assert ceilings.seconds(decode) == (2 * 8 * 4096 * 128 * 4 / 50e9, "read")
    assert ceilings.seconds(prefill) == (4 * 8 * 2048**2 * 128 / 300e9, "GEMM")
    assert ceilings.seconds(replace(prefill, dtype="bf16")) == (4 * 8 * 2048**2 * 128 / 600e9, "GEMM")
    assert replace(decode, dtype="fp16").bytes == decode.bytes / 2


def test_a_layer_is_four_projections_and_the_attention_between():
    assert Layer(2, 5, 6, 3, FULL, "").flops == 2 * (4 * 2 * 5 * 6 * 6 + 2 * 2 * 5 * 5 * 6)


def test_ceilings_are_rates_and_the_better_measurement_counts():
    measured = measure_ceilings([TINY], seconds=0.01)
    assert list(measured.gemm) == ["fp32"]
    assert all(rate > 1e8 for rate in measured.gemm.values())
    assert all(rate > 1e8 for rate in measured.read.values())
    one, other = Ceilings({"fp32": 2.0}, {16: 5.0}), Ceilings({"fp32": 3.0}, {16: 4.0})
    assert one.best(other) == Ceilings({"fp32": 3.0}, {16: 5.0})


def test_the_fastest_way_there_is_makes_the_ceiling(monkeypatch):
    """Ours too, where it is: a share of a slow yardstick would flatter."""
    multiplied = []

    def best(way, seconds):
        multiplied.clear()
        way()
        return 1.0 if multiplied else 2.0

    plain = ceilings.linear
    monkeypatch.setattr(ceilings, "_best", best)
    monkeypatch.setattr(ceilings, "linear", lambda *call: multiplied.append(call) or plain(*call))
    assert ceilings.gemm_rate("fp32", 1, ((64, 96, 32),)) == 2 * 64 * 96 * 32
    assert ceilings.read_rate(16 * 1024, 1) == 16 * 1024


def test_half_precision_is_never_held_to_less_than_single(monkeypatch):
    rates = {"fp32": 3.0, "bf16": 5.0, "fp16": 1.0}
    monkeypatch.setattr(ceilings, "gemm_rate", lambda dtype, seconds, sizes=None: rates[dtype])
    cases = [replace(TINY, dtype=dtype) for dtype in rates]
    assert measure_ceilings(cases, seconds=0.001).gemm == {"fp32": 3.0, "bf16": 5.0, "fp16": 3.0}


def test_a_hopeless_product_is_tried_in_the_small_only(monkeypatch):
    asked = []

    def rate(dtype, seconds, sizes=ceilings.GEMM_SIZES):
        asked.append((dtype, sizes))
        return {"fp32": 3.0, "fp16": 0.01}[dtype]

    monkeypatch.setattr(ceilings, "gemm_rate", rate)
    assert measure_ceilings([replace(TINY, dtype="fp16")], seconds=0.001).gemm == {"fp32": 3.0, "fp16": 3.0}
    assert ("fp16", ceilings.GEMM_SIZES) not in asked


def test_every_case_has_a_name_of_its_own_a_reason_and_goals_for_its_peers_only():
    assert len({case.name for case in CASES}) == len(CASES)
    for case in CASES:
        assert case.why
        assert set(case.goals) <= set(case.peers)
    assert goal(TINY, SDPA) == 1.0


def test_cases_are_chosen_by_part_of_a_name_or_by_a_glob():
    assert {case.mask.label for case in select(["window"])} == {"window256-causal"}
    assert all(case.name.endswith("/causal") for case in select(["*/causal"]))
    assert len(select(quick=True)) < len(select())


def test_every_case_of_single_precision_is_there_in_half():
    def of_the_table(**options):
        return [case for case in select(named=True, **options) if not isinstance(case, Step | Whole)]

    assert [case.name for case in of_the_table()] == [case.name for case in SINGLE]
    for dtype in ("bf16", "fp16"):
        found = of_the_table(dtypes=[dtype])
        assert [case.name for case in found] == [f"{case.name}/{dtype}" for case in SINGLE]
        assert all(OURS_FP32 in case.peers for case in found if isinstance(case, Attend | Layer))
    assert set(HALF_GOALS) <= {case.name for case in CASES}
    [decode] = select(["decode/1x32:8"], dtypes=["bf16"])
    assert goal(decode, OURS_FP32) == 1.7
    assert {case.name for case in select(["train"])} == {
        f"train/{n}/{m}" for n in ("1x8x512x64", "1x8x2048x64", "8x12x197x64") for m in ("full", "causal")
    }
    assert {type(case) for case in select(["train"])} == {Train}
