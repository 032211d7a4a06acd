"""DDP's buckets, against torch's own rule."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_memtools.estimate.buckets import bucket_bytes
from tests.zoo import torchvision_models


@pytest.mark.parametrize("bucket_mb", [1, 5, 25])
def test_buckets_are_those_of_torch(bucket_mb):
    with torch.device("meta"):
        model = torchvision_models().resnet50()
        model.fc.half()
    model.conv1.requires_grad_(requires_grad=False)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups, _ = dist._compute_bucket_assignment_by_size(
        [torch.empty_like(parameter, device="cpu") for parameter in reversed(parameters)],
        [dist._DEFAULT_FIRST_BUCKET_BYTES, bucket_mb * 2**20],
    )
    parameters.reverse()
    expected = sorted(sum(parameters[i].numel() * parameters[i].element_size() for i in group) for group in groups)
    assert sorted(bucket_bytes(model.parameters(), bucket_mb)) == expected


def test_no_gradient_no_bucket():
    assert bucket_bytes(nn.Linear(2, 2).requires_grad_(requires_grad=False).parameters(), 25) == []
