"""What cuDNN 9.19 took for recurrent layers on an H100."""

import pytest
import torch

from lightning_memtools.memory.cuda_ops.recurrent import cudnn_spaces

# Kind, layers, both ways, hidden, time steps times batch, dtype, dropout, bytes of workspace and of reserve space.
MEASURED = [
    ("lstm", 1, False, 512, 2048, torch.float32, 0.0, 38404608, 20971776),
    ("lstm", 3, True, 100, 350, torch.float32, 0.0, 57061184, 4760256),
    ("gru", 2, False, 100, 350, torch.float16, 0.0, 18364512, 910272),
    ("rnn", 2, False, 32, 200, torch.bfloat16, 0.0, 16842656, 38656),
    ("gru", 3, True, 1024, 1600, torch.float32, 0.0, 327025024, 262144256),
]


@pytest.mark.parametrize("measured", MEASURED)
def test_the_reserve_space_is_the_measured_one_and_the_workspace_is_near(measured):
    kind, layers, both, hidden, places, dtype, dropout, work, kept = measured
    source = torch.empty(places, 1, 16, dtype=dtype, device="meta")
    spaces = cudnn_spaces(kind, (hidden, layers, both, False), dropout, source, hidden * (1 + both))
    assert spaces[1] == kept
    assert spaces[0] == pytest.approx(work, rel=0.35)
