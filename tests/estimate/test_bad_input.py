"""What a user gets wrong, and what the message says of it."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from lightning_memtools.estimate import estimate_memory
from lightning_memtools.simulation.cuda_run import CudaRunError
from tests.estimate.networks import Classifier, Gan, mlp, total


class Reads(nn.Module):
    """Looks at values, and picks rows by them."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, rows):
        hidden = self.layer(rows)
        if hidden.sum().item() > 1e9:  # the line that the message has to name
            hidden = hidden * 2
        return hidden[hidden > -1e9]


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_what_a_step_reads_of_values_that_are_not_known_is_named_with_what_was_assumed(device):
    with torch.device(device):
        model = Reads()
    weight = model.layer.weight
    made = estimate_memory(model, torch.ones(64, 32), step=total, optimizer=torch.optim.SGD, device="cpu")
    number, mask = sorted(made.notes, key=lambda note: "mask" in note)
    source = inspect.getsource(Reads).splitlines()
    first = inspect.getsourcelines(Reads)[1]
    for note, code in ((number, ".item()"), (mask, "hidden[hidden")):
        line = first + next(at for at, text in enumerate(source) if code in text)
        assert f"test_bad_input.py:{line}:" in note
    assert "1.0" in number
    assert "everything" in mask
    assert model.layer.weight is weight
    assert weight.grad is None


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("kind", ["GRU", "LSTM"])
def test_packed_sequences_have_the_memory_of_their_own_lengths(kind, precision):
    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = getattr(nn, kind)(16, 32, batch_first=True)

        def forward(self, batch):
            rows, lengths = batch
            packed = pack_padded_sequence(rows, lengths, batch_first=True, enforce_sorted=False)
            return pad_packed_sequence(self.layer(packed)[0], batch_first=True)[0]

    def estimate(*lengths):
        batch = torch.ones(3, 30, 16), torch.tensor(lengths)
        return estimate_memory(Packed(), batch, step=total, precision=precision)

    full, short = estimate(30, 30, 30), estimate(10, 30, 20)
    assert full.notes == short.notes == ()
    assert full.composition["parameters"] == short.composition["parameters"]
    assert full.peak_allocated - short.peak_allocated > 30 * 32 * 4  # a third of the outputs is not there


def test_lbfgs_is_refused_with_what_it_would_keep():
    model = mlp(512, 512)  # 1 MiB and a bias
    with pytest.raises(ValueError, match=r"LBFGS .*200 vectors.*history_size=100\): 200 MiB"):
        estimate_memory(model, torch.ones(2, 512), step=total, optimizer=torch.optim.LBFGS)


def test_an_operator_without_a_fake_kernel_is_named():
    library = torch.library.Library("memtools_test", "DEF")
    library.define("scale(Tensor x) -> Tensor")
    library.impl("scale", lambda x: x * 2, "CPU")
    try:
        with pytest.raises(RuntimeError, match=r"memtools_test.scale[\s\S]*test_bad_input.py[\s\S]*register_fake"):
            estimate_memory(
                mlp(8, 8, 8),
                torch.ones(4, 8),
                step=lambda m, b: torch.ops.memtools_test.scale(b).sum() + m(b).sum(),
                device="cpu",
            )
    finally:
        library._destroy()


def test_an_operator_made_with_custom_op_is_named_too():
    @torch.library.custom_op("memtools_test::twice", mutates_args=())  # type: ignore[untyped-decorator]
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    with pytest.raises(RuntimeError, match=r"memtools_test::twice[\s\S]*test_bad_input.py[\s\S]*register_fake"):
        estimate_memory(mlp(8, 8), torch.ones(4, 8), step=lambda m, b: m(twice(b)).sum(), device="cpu")


def test_the_users_own_error_stays_on_top(caplog):
    def step(model, batch):
        return model(batch["rows"]).sum()

    with pytest.raises(KeyError, match="rows"):
        estimate_memory(mlp(8, 8), {"columns": torch.ones(2, 8)}, step=step)
    with pytest.raises(RuntimeError, match=r"\[2, 9\] X \[8, 8\]"):
        estimate_memory(mlp(8, 8), torch.ones(2, 9), step=total)
    assert caplog.text == ""


def test_after_an_error_everything_is_as_before():
    model = mlp(8, 8)
    parameters = list(model.parameters())

    def step(model, batch):
        model.seen = batch
        raise KeyError("mine")

    with pytest.raises(KeyError):
        estimate_memory(model, torch.ones(2, 8), step=step)
    assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
    assert not hasattr(model, "seen")
    # and the next estimate works
    assert estimate_memory(model, torch.ones(2, 8), step=total).peak_allocated > 0


def test_a_capacity_below_the_parameters_says_by_how_much():
    made = estimate_memory(mlp(1024, 1024), torch.ones(1, 1024), step=total, capacity="1MiB")
    assert not made.fits("1MiB")
    report = made.to_markdown()
    assert "take 4.00 MiB, 3.00 MiB more than its 1.00 MiB" in report
    assert made.shortfall("1MiB") == made.peak_allocated - 2**20
    assert made.max_batch_size("1MiB") == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stage": "fit"}, "'fit'. Accepted are 'train', 'val', 'test', 'predict'"),
        ({"precision": "fp16"}, "'fp16'. Accepted are '32-true'"),
        ({"device": "mps"}, "Unknown device 'mps'"),
        ({"engine": "gpu"}, "'gpu'. Accepted are 'simulation' and 'cuda'"),
        ({"engine": "cuda", "device": "cpu"}, "leave device='cpu' out"),
        ({"steps": 0}, "steps is 0: .*at least 1"),
        ({"accumulate": 1.5}, "accumulate is 1.5"),
        ({"step": None}, "is no LightningModule.*Pass step="),
        ({"capacity": "24"}, "Not a capacity: '24'"),
        ({"allocator": "expandable:True"}, "expandable"),
        ({"ddp_bucket_mb": 0}, "ddp_bucket_mb is 0"),
        ({"steps": True}, "steps is True"),
        ({"clip": -1.0}, "clip is -1.0: .*the norm"),
        ({"optimizer": torch.optim.SGD(mlp(4, 4).parameters())}, "none of the parameters of Sequential"),
        ({"model": nn.LazyLinear(3)}, "no shape yet.*once"),
        ({"model": Gan(), "step": None, "clip": 1.0}, "Gan optimizes manually.*accumulate and clip"),
        ({"model": Gan(), "step": None, "accumulate": 2}, "Gan optimizes manually.*accumulate and clip"),
        ({"strategy": "fsdp3", "devices": 8}, r"'fsdp3'\. Accepted are 'ddp', 'fsdp', 'fsdp2'\."),
        ({"strategy": "deepspeed_stage_3", "devices": 8}, "DeepSpeed's engine"),
        ({"strategy": "fsdp2"}, "strategy='fsdp2' and devices=1 "),
        ({"devices": 8}, "strategy=None and devices=8 "),
        ({"strategy": "ddp", "devices": 2.5}, r"devices is 2\.5: .*number of ranks"),
        ({"strategy": "ddp", "devices": 2, "shard": print}, 'shard belongs to strategy="fsdp2"'),
        ({"strategy": "fsdp2", "devices": 8, "device": "cpu"}, "leave device='cpu' out"),
        ({"strategy": "fsdp2", "devices": 8, "precision": "16-mixed"}, '"bf16-mixed" takes the same'),
        ({"strategy": "fsdp", "devices": 8, "clip": 1.0}, "clip .* FSDP 1"),
    ],
    ids=str,
)
def test_bad_arguments_name_what_is_accepted(changes, message):
    with pytest.raises(ValueError, match=message):
        estimate_memory(**({"model": mlp(4, 4), "batch": torch.ones(2, 4), "step": total} | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer": "Adam"}, "optimizer is 'Adam': .*torch.optim.AdamW"),
        (
            {"strategy": "fsdp", "devices": 8, "optimizer": torch.optim.SGD([nn.Parameter(torch.ones(2))])},
            "SGD .* whole parameters",
        ),
        ({"step": 3}, "step must be a function.* got int"),
        ({"optimizer": lambda _parameters: 3}, "optimizer returned 3: .*torch.optim.Optimizer"),
        ({"step": lambda m, b: m(b)}, r"shape \[2, 4\].*return the loss"),
        ({"model": lambda x: x}, "model must be an nn.Module, got function"),
    ],
    ids=range(6),
)
def test_arguments_of_a_wrong_type_raise_an_error_that_names_the_types(changes, message):
    with pytest.raises(TypeError, match=message):
        estimate_memory(**({"model": mlp(4, 4), "batch": torch.ones(2, 4), "step": total} | changes))


def test_a_stage_that_the_module_lacks_is_named():
    batch = (torch.zeros(2, 32), torch.zeros(2, dtype=torch.long))
    # It inherits a test_step from Lightning, which does nothing.
    with pytest.raises(ValueError, match=r"Classifier has no test_step.*stage='test'"):
        estimate_memory(Classifier(), batch, stage="test")
    module = Classifier()
    module.validation_step = None
    with pytest.raises(ValueError, match=r"Classifier has no validation_step.*stage='val'"):
        estimate_memory(module, batch, stage="val")


def test_a_model_that_makes_parameters_in_configure_model_is_refused_with_the_reason():
    class Later(Classifier):
        def __init__(self):
            super().__init__()
            del self.network

        def configure_model(self):
            self.network = mlp(32, 4)

    batch = (torch.zeros(2, 32), torch.zeros(2, dtype=torch.long))
    with pytest.raises(ValueError, match=r"Later has no parameters.*configure_model"):
        estimate_memory(Later(), batch)
    module = Later()
    with torch.device("meta"):
        module.configure_model()
    assert estimate_memory(module, batch).parameter_count == 32 * 4 + 4


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is a build for CUDA")
def test_the_engine_of_cuda_without_its_device_names_the_way_to_start_one():
    with pytest.raises(CudaRunError, match=r"start this program with `python -m lightning_memtools\.null_cuda`"):
        estimate_memory(mlp(4, 4), torch.zeros(2, 4), step=total, stage="val", engine="cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="where there is no device that computes nothing")
@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_sharding_needs_pytorchs_cuda_code_and_the_message_says_how_to_get_it(strategy):
    with pytest.raises(CudaRunError, match=rf'strategy="{strategy}" needs .*`memtools estimate --strategy {strategy} '):
        estimate_memory(mlp(64, 64), torch.ones(4, 64), step=total, strategy=strategy, devices=8)


def test_a_rank_of_ddp_is_simulated_anywhere():
    made, simulated = (
        estimate_memory(mlp(64, 64), torch.ones(4, 64), step=total, optimizer=torch.optim.SGD, **options)
        for options in ({"strategy": "ddp", "devices": 8}, {"ddp_bucket_mb": 25})
    )
    assert made.peak_allocated == simulated.peak_allocated
    assert made.notes == ("One of 8 ranks under DDP.",)


def test_a_graph_that_cannot_be_cut_by_rows_is_estimated_and_its_largest_batch_is_refused():
    def step(model, batch):
        nodes, edges, graphs = batch
        passed = model(nodes).index_add(0, edges[1], model(nodes)[edges[0]])
        return sum(passed[first].sum() for first in (0, 10, 20, 30)) + graphs.sum()

    graph = torch.randn(40, 8), torch.randint(0, 40, (2, 90)), torch.arange(40) // 10
    made = estimate_memory(nn.Linear(8, 8), graph, step=step, optimizer=torch.optim.SGD)
    with pytest.raises(ValueError, match=r"cannot be resized: .* \(IndexError: .*several sizes"):
        made.max_batch_size("17MiB")
