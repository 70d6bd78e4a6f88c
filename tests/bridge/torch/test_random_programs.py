"""Random programs of torch: right ones give what one worker does, and where a worker differs the program stops."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from random_torch_programs import draw, verdict

pytestmark = [
    pytest.mark.host("tensors of these tests lie on the host"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


def check(seeds):
    told = [text for text in map(verdict, map(draw, seeds)) if text]
    assert not told, "\n\n".join(told[:3])


def test_programs():
    check(range(60))


@pytest.mark.full
@pytest.mark.parametrize("first", range(1000, 3000, 500))
def test_many_programs(first):
    check(range(first, first + 500))
