"""What a start does with the garbage collector, it also undoes."""

from __future__ import annotations

import gc

import pytest

from molora_cli.core.starting import collector_paused


def test_the_collector_is_back_afterwards() -> None:
    assert gc.isenabled()
    with collector_paused():
        assert not gc.isenabled()
        with collector_paused():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(KeyboardInterrupt), collector_paused():
        raise KeyboardInterrupt
    assert gc.isenabled()
