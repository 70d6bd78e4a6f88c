"""The engine of the benchmarks: who takes part, who does not, and that other numbers do not pass for the same."""

from __future__ import annotations

import importlib
import json
import mmap
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from launch import ROOT, run_python

TOY = """
import time
import numpy as np
from benchmarks.contest import Case, Section, repeated

TOY = Section("toy", "sums", 1e-9)


def case(numbers, pause=0.0):
    return lambda: Case(repeated(lambda: time.sleep(pause)), lambda: [np.asarray(numbers)])


@TOY.contestant("spmd")
def _(quick):
    return {"small": case([1.0, 2.0]), "large": case([5.0], 0.001)}


@TOY.contestant("slower")
def _(quick):
    return {"small": case([1.0, 2.0]), "large": case([5.0], 0.02)}


@TOY.contestant("wrong")
def _(quick):
    return {"small": case([2.0, 1.0]), "large": case([5.0])}


@TOY.contestant("ends")
def _(quick):
    return {"small": lambda: 1 / 0, "large": case([5.0])}


AWAY = Section("away", "nobody")


@AWAY.contestant("spmd", needs=("no_such_package",))
@TOY.contestant("away", needs=("no_such_package",))
def _(quick):
    return {"small": case([1.0, 2.0])}
"""
RUN = """
import sys
from pathlib import Path
from benchmarks import contest, report

table = contest.compete("toy", "TOY", True)
folder = Path(sys.argv[1])
(folder / "t.txt").write_text(report.text(table))
(folder / "t.md").write_text(report.markdown([table]))
(folder / "t.json").write_text(report.as_json([table]))
report.picture(table, folder / "t.png")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    pytest.importorskip("matplotlib")
    folder = tmp_path_factory.mktemp("toy")
    (folder / "toy.py").write_text(TOY)
    done = run_python("-c", RUN, folder, PYTHONPATH=f"{ROOT}{os.pathsep}{folder}")
    assert done.returncode == 0, done.stderr
    return folder


def test_who_takes_part(folder):
    found = json.loads((folder / "t.json").read_text())["sections"]["toy"]
    assert set(found["cases"]["small"]) == {"spmd", "slower", "wrong"}
    assert found["absent"] == {
        "away": "needs no_such_package",
        "ends": "it ended in small: ZeroDivisionError: division by zero",
    }


def test_entries_in_another_order_are_other_numbers(folder):
    found = json.loads((folder / "t.json").read_text())["sections"]["toy"]
    assert found["parted"] == ["wrong, small"]
    assert "NOT THE SAME NUMBERS: wrong, small" in (folder / "t.txt").read_text()


def test_who_is_slower_is_shown_so(folder):
    large = json.loads((folder / "t.json").read_text())["sections"]["toy"]["cases"]["large"]
    assert large["slower"]["median"] >= 0.02
    assert large["slower"]["median"] > large["spmd"]["median"] >= 0.001
    assert len(large["spmd"]["seconds"]) == 3


def test_tables_and_picture(folder):
    lines = (folder / "t.md").read_text().splitlines()
    assert lines[lines.index("## toy: sums") + 2] == "|  | spmd | slower | wrong |"
    assert sum(line.startswith("| ") for line in lines) == 3
    assert (folder / "t.png").read_bytes().startswith(b"\x89PNG")


def test_an_unknown_section_is_named(tmp_path):
    done = run_python("-m", "benchmarks", "w9", "--output", tmp_path, PYTHONPATH=str(ROOT))
    assert done.returncode == 2
    assert "no section w9; there are local, mpi, w1" in done.stderr


@pytest.fixture
def benchmarks(folder, monkeypatch, tmp_path):
    """python -m benchmarks, with the sections of the toy; it writes to tmp_path."""
    from benchmarks import __main__

    def run(*args):
        monkeypatch.setattr(sys, "argv", ["benchmarks", *args, "--output", str(tmp_path)])
        return __main__.main()

    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{folder}")
    monkeypatch.setattr(__main__, "SECTIONS", {"toy": ("toy", "TOY"), "away": ("toy", "AWAY")})
    return run


def test_a_run_writes_its_results_to_the_folder(benchmarks, tmp_path):
    assert benchmarks("toy", "away", "--quick", "--only", "small") == 1, "wrong computes other numbers"
    assert {path.name for path in tmp_path.iterdir()} == {"results.md", "results.json", "toy.png"}
    assert list(json.loads((tmp_path / "results.json").read_text())["sections"]) == ["toy", "away"]
    assert "- NOT THE SAME NUMBERS: wrong, small" in (tmp_path / "results.md").read_text()


def test_git_ignores_the_folder_where_results_are_written_by_default():
    from benchmarks.__main__ import OUTPUT

    assert f"/{OUTPUT.relative_to(ROOT)}/" in (ROOT / ".gitignore").read_text().splitlines()


def test_where_nobody_is_there_no_text_is_blamed(benchmarks, capsys):
    assert benchmarks("away", "--quick") == 0
    assert "spmd is absent: needs no_such_package" in capsys.readouterr().out


def test_a_text_that_no_case_holds_is_told_from_the_cases(benchmarks, capsys):
    with pytest.raises(SystemExit) as ended:
        benchmarks("toy", "--quick", "--only", "zzz")
    assert ended.value.code == 2
    assert "--only 'zzz' is in the name of no case; there are\n  toy: small, large" in capsys.readouterr().err


def test_an_open_mpi_that_is_not_there_is_absent(monkeypatch, tmp_path):
    from benchmarks.contest import Section, missing

    section = Section("toy", "a table")
    section.contestant("peer", launcher="mpiexec-openmpi", processes=2)(lambda quick: {})
    python = tmp_path / "python"
    monkeypatch.setenv("BENCHMARK_OPENMPI_PYTHON", str(python))
    assert f"no {python}" in missing(section.contestants["peer"])
    python.touch()
    assert missing(section.contestants["peer"]) == f"BENCHMARK_OPENMPI_PYTHON: no {tmp_path / 'mpiexec'}"
    (tmp_path / "mpiexec").touch()
    assert not missing(section.contestants["peer"])
    monkeypatch.setenv("BENCHMARK_OPENMPI_PYTHON", "")
    assert missing(section.contestants["peer"]) == "BENCHMARK_OPENMPI_PYTHON"
    monkeypatch.delenv("BENCHMARK_OPENMPI_PYTHON")
    assert missing(section.contestants["peer"]) == "BENCHMARK_OPENMPI_PYTHON"


def test_the_error_is_named_and_not_what_a_launcher_writes_below_it():
    from benchmarks.contest import Ended

    said = (
        "Traceback (most recent call last):\n  File x\n[rank0]: torch.OutOfMemoryError: too much\n=====\nFAILED\n====="
    )
    assert Ended(said).reason == "[rank0]: torch.OutOfMemoryError: too much"
    assert Ended("it was killed\n").reason == "it was killed"


@pytest.mark.parametrize("place", ["file", "file/of/it"])
def test_where_nothing_can_be_written_nothing_is_measured(place, tmp_path):
    (tmp_path / "file").write_text("")
    done = run_python("-m", "benchmarks", "w3", "--output", tmp_path / place, PYTHONPATH=str(ROOT))
    assert done.returncode == 2
    assert "argument --output: nothing can be" in done.stderr
    assert not done.stdout


def test_what_is_to_hold_names_cases_and_contestants_that_there_are():
    from benchmarks.__main__ import SECTIONS
    from benchmarks.targets import TARGETS

    cases = {}
    for target in TARGETS:
        module, attribute = SECTIONS[target.section]
        section = getattr(importlib.import_module(module), attribute)
        assert {*target.ours, *target.peers} <= section.contestants.keys(), target
        for ours in target.ours:
            if (target.section, ours) not in cases:
                cases[target.section, ours] = section.contestants[ours].build(False)
            assert target.case in cases[target.section, ours], target


def test_what_is_to_hold_is_found_by_medians():
    from benchmarks.contest import Measured, Section, Table
    from benchmarks.report import aims
    from benchmarks.targets import found

    def table(**seconds):
        names = {"ours": "spmd", "jax": "jax, 2 devices", "gloo": "torch, gloo", "limit": "limit"}
        names["told"] = "jax, 2 devices, large pages"
        row = {names[n]: Measured([s / 2, s, 3 * s]) for n, s in seconds.items()}
        return Table(Section("local", "a table"), {"all-reduce 64 MB": row, "permute 4 MB": {}})

    all_there = found([table(ours=2.0, jax=9.0, gloo=8.0, limit=1.5)])
    values = {f.peer: (round(f.value, 6), f.met) for f in all_there if f.value is not None}
    assert values == {"jax, 2 devices": (4.5, False), "torch, gloo": (4.0, True), "limit": (0.75, False)}
    assert "MISSED" in aims([table(ours=2.0, jax=9.0)])
    assert "MISSED" not in aims([table(ours=2.0, jax=10.0)])
    (beyond,) = found([table(ours=4.0, jax=9.0, limit=3.0)])[:1]
    assert beyond.limit == 3.0
    assert beyond.out_of_reach  # the limit has 3, of the 5 that are wanted
    assert "out of reach" in aims([table(ours=4.0, jax=9.0, limit=3.0)])
    assert not found([table(ours=4.0, jax=18.0, limit=3.0)])[0].out_of_reach
    assert found([table(ours=2.0, jax=9.0, limit=3.0)])[0].limit is None, "a limit that ours is ahead of is none"
    told = found([table(ours=2.0, jax=12.0, told=5.0)])[0]
    assert (told.value, told.met, told.told) == (6.0, True, 2.5)
    assert "6.00× 5× 2.50× met" in " ".join(aims([table(ours=2.0, jax=12.0, told=5.0)]).split())
    for alone in (table(ours=2.0), table(jax=2.0)):
        assert not any(f.met for f in found([alone]))
        assert "not measured" in aims([alone])
        assert "met" not in aims([alone]).replace("not measured", "")
    assert not found([Table(Section("local", "other cases"), {"all-reduce 1 MB": {}})])


def test_markdown_holds_the_targets_that_are_not_met_and_of_many_cases_those_with_a_target():
    from benchmarks.contest import Measured, Section, Table
    from benchmarks.report import MOST, markdown

    section = Section("local", "a table")
    row = {"spmd": Measured([2.0]), "jax, 2 devices": Measured([9.0]), "torch, gloo": Measured([9.0])}
    for name in row:
        section.contestant(name)(lambda quick: {})
    rows = {"all-reduce 64 MB": row, "permute 64 MB": row} | {f"case {k}": row for k in range(2, MOST)}
    told = markdown([Table(section, rows)])
    assert "\n2 of 5 are met.\n" in told
    assert "| local: all-reduce 64 MB | jax, 2 devices | 4.50× | 5× |  |  | MISSED |\n" in told
    assert "\n| case 2 | 2.00 s | 9.00 s (4.50×) | 9.00 s (4.50×) |\n" in told
    told = markdown([Table(section, {**rows, "one more": row})])
    assert "\n| permute 64 MB | 2.00 s" in told
    assert "| case 2 |" not in told
    assert "| one more |" not in told


def test_markdown_counts_the_cases_in_which_a_machine_was_disturbed():
    from benchmarks.contest import Measured, Section, Table
    from benchmarks.report import markdown

    rows = {case: {"spmd": Measured([1.0])} for case in ("small", "large", "wide")}
    stolen = {"small": [0.01], "large": [0.3], "wide": [0.2]}
    told = markdown([Table(Section("toy", "a table"), rows, stolen, paces={"small": [1e-3], "large": [1.5e-3]})])
    assert "- the machine was busy in 2 of 3 cases: other work took up to 30% of two cores\n" in told
    assert "- the cores were slow in 1 of 3 cases: Python took up to 1.50 times its shortest time\n" in told


def test_a_peer_that_was_not_weighed_is_named_where_memory_is_compared():
    from benchmarks.contest import Measured, Section, Table
    from benchmarks.targets import found

    row = {"spmd": Measured([1.0], 10), "torch DTensor": Measured([1.0], 20), "torch, by hand": Measured([1.0])}
    tables = [Table(Section("w2", "a table"), {"512 tokens, 1024-4096-1024": row})]
    (weighed,) = [f for f in found(tables) if f.target.of == "memory"]
    assert (weighed.value, weighed.peer, weighed.absent) == (0.5, "torch DTensor", ("torch, by hand",))


def test_a_busy_machine_is_named_with_the_case():
    from benchmarks.contest import Measured, Section, Table
    from benchmarks.report import text

    rows = {case: {"spmd": Measured([1.0])} for case in ("small", "large")}
    told = text(Table(Section("toy", "a table"), rows, {"small": [0.0, 0.02, 0.5], "large": [0.3, 0.2, 0.01]}))
    assert "other work took 20% of two cores in large" in told
    assert "in small" not in told


def test_slow_cores_are_named_with_the_cases():
    from benchmarks.contest import Measured, Section, Table, pace
    from benchmarks.report import text

    cores = os.sched_getaffinity(0)
    assert 0 < pace() < 1
    assert os.sched_getaffinity(0) == cores
    rows = {case: {"spmd": Measured([1.0])} for case in ("small", "large", "wide")}
    paces = {"small": [1e-3, 1.1e-3, 3e-3], "large": [1e-3, 1.8e-3, 2e-3], "wide": [1.5e-3]}
    told = text(Table(Section("toy", "a table"), rows, paces=paces))
    assert "Python took its shortest time: 1.80 in large, 1.50 in wide" in told
    assert "in small" not in told
    alone = Table(Section("other", "a table"), {"one": rows["small"]}, paces={"one": [1.4e-3, 1.4e-3]})
    assert "slow" not in text(alone)
    assert "1.40 in one" in text(alone, [Table(Section("toy", "a table"), rows, paces=paces), alone])


def test_one_wrong_row_is_another_number():
    from benchmarks.contest import _agree, _fingerprint

    x = np.random.default_rng(0).standard_normal((4096, 64), np.float32)
    other = x.copy()
    other[-1] = x[-2]
    one, same, wrong = ([_fingerprint(a)] for a in (x, x.copy(), other))
    assert _agree(one, same, 1e-12)
    assert not _agree(one, wrong, 1e-5)
    assert not _agree(one, [*same, *same], 1e-5)
    assert not _agree(*([_fingerprint(a.reshape(-1))] for a in (x, other)), 1e-12)
    for number in (np.inf, np.nan):
        other[5, 5] = number
        assert not _agree(one, [_fingerprint(other)], 1e-5)
        assert not _agree([_fingerprint(other)], [_fingerprint(other)], 1e-5)


@pytest.mark.full
@pytest.mark.parametrize(
    "section", ["w3", "w4", "loops", "memory", "updates", "bridge", "saving", "checks", "profiles"]
)
def test_a_section_runs(section, tmp_path):
    pytest.importorskip("jax")
    new = tmp_path / "new"
    done = run_python("-m", "benchmarks", section, "--quick", "--output", new, timeout=600, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    assert section in (new / "results.json").read_text()
    assert "NOT THE SAME" not in done.stdout


def test_workers_that_take_different_times_give_one():
    """Each worker has a clock of its own: what ours returns is a number all the same."""
    from benchmarks.collectives import Work, ours

    case = ours(Work("all-reduce", "4 B"), "local")
    assert case.run(3) > 0.0


LOOKS = """
import mmap, sys
seen = mmap.mmap(int(sys.argv[1]), 0)
print(sum(seen[::4096]), flush=True)
input()
"""


def test_memory_that_processes_share_is_counted_once():
    """Of 16 MB that two processes look at each has half; of 8 MB of its own all."""
    from benchmarks.contest import Case, _peak

    file = os.memfd_create("shared")
    os.ftruncate(file, 16 << 20)
    with mmap.mmap(file, 0) as shared, mmap.mmap(-1, 8 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as mine:

        def touch(_count: int) -> float:
            for memory in (shared, mine):
                for at in range(0, len(memory), mmap.PAGESIZE):
                    memory[at] = 1
            other = subprocess.Popen(
                [sys.executable, "-c", LOOKS, str(file)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                pass_fds=[file],
            )
            others.append(other)
            assert int(other.stdout.readline()) == (16 << 20) // 4096
            return 0.0

        others: list[subprocess.Popen] = []
        try:
            peak = _peak(Case(touch, list))
        finally:
            for other in others:
                other.communicate("\n", timeout=20)
            os.close(file)
    assert 15 << 20 < peak < 19 << 20


UNEVEN = """
import os
import time
import numpy as np
from benchmarks.contest import Case, Section, repeated

UNEVEN = Section("uneven", "processes that take different memory", memory=True)


@UNEVEN.contestant("spmd", launcher="torchrun", processes=2, needs=("torch",))
def _(quick):
    nbytes = (4 << 20) * (1 + 2 * int(os.environ["RANK"]))
    return {"fill": lambda: Case(repeated(lambda: np.ones(nbytes, np.uint8)), list)}
"""


@pytest.mark.torch
def test_the_peak_is_that_of_the_process_that_takes_the_most(tmp_path):
    """The second of two processes fills 12 MB, the first one 4."""
    pytest.importorskip("torch")
    (tmp_path / "uneven.py").write_text(UNEVEN)
    code = "from benchmarks import contest; print(contest.compete('uneven', 'UNEVEN', True).rows['fill']['spmd'].peak)"
    done = run_python("-c", code, PYTHONPATH=f"{ROOT}{os.pathsep}{tmp_path}")
    assert done.returncode == 0, done.stderr
    assert 23 << 20 < int(done.stdout.splitlines()[-1]) < 28 << 20
