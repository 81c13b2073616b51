"""A router that reads one deep hidden state of a first pass, without a base around it."""

from __future__ import annotations

import torch

from molora_cli.core.router.files import join_tensors
from molora_cli.core.router.kinds import Surroundings
from molora_cli.core.router.spec import RouterSpec, StageSpec
from molora_cli.core.router.stack import RouterStack
from molora_cli.core.router.taps import TapHead

NAMES = ("a", "b", "c")


def test_a_first_pass_decides_every_group_of_layers() -> None:
    torch.manual_seed(0)
    head = TapHead(8, 3, hidden=16)
    torch.nn.init.normal_(head.outer.weight)
    tensors = join_tensors([{f"taps.0.{name}": value for name, value in head.state_dict().items()}])
    spec = StageSpec(kind="hidden", experts=list(NAMES), params={"head": "mlp", "tap": 2})
    ids, state = torch.arange(9).unsqueeze(0), torch.randn(1, 9, 8)
    found = []
    for groups in ([], [(0, 1), (1, 4)]):
        stages = [spec.model_copy(update={"groups": groups})]
        router = RouterStack(RouterSpec(stages=stages), tensors, Surroundings(n_layers=4), NAMES)
        deciding = router.begin(ids, None, router.start(1))
        assert deciding.tap(2, state) == list(range(max(1, len(groups))))
        found.append(deciding.decision().route.indices)
    assert found[1].shape == (1, 9, 2, 1) and len(found[0].unique()) > 1
    assert torch.equal(found[1], found[0].expand_as(found[1]))
