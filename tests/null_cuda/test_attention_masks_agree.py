"""A mask of ones is left out, and a padded one made, by all that run a step without values: as on a GPU."""

from __future__ import annotations

import json
import runpy
from functools import partial

import pytest
import torch

from lightning_memtools import estimate_memory
from lightning_memtools.cli.dry_run import dry_run
from tests.null_cuda.dry_run_scripts import write_script

pytest.importorskip("transformers")
pytestmark = pytest.mark.cuda_memory

SCRIPT = """
    import gc, json
    import torch
    from lightning_memtools._torch import clear_cublas_workspaces
    from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

    SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    MODELS = {
        "bert": lambda: BertForMaskedLM(BertConfig(vocab_size=500, **SIZES)),
        "llama": lambda: LlamaForCausalLM(
            LlamaConfig(vocab_size=500, num_key_value_heads=2, use_cache=False, attention_dropout=0.1, **SIZES)
        ),
    }
    words = torch.ones(4, 192, dtype=torch.long)
    padded = words.clone()
    padded[0, -8:] = 0
    halves = torch.arange(96).repeat(4, 2)
    BATCHES = {
        "no mask": {"input_ids": words},
        "ones": {"input_ids": words, "attention_mask": words},
        "padded": {"input_ids": words, "attention_mask": padded},
        "one sequence": {"input_ids": words, "position_ids": torch.arange(192).repeat(4, 1)},
        "packed": {"input_ids": words, "position_ids": halves},
    }
    CASES = [("bert", "no mask"), ("bert", "ones"), ("bert", "padded")] + [("llama", name) for name in BATCHES]

    def step(model, batch):
        return model(**batch).logits.float().square().mean()

    def peak(name, batch):
        gc.collect()
        clear_cublas_workspaces()
        torch.cuda.empty_cache()  # how blocks are split depends on what is cached
        torch.cuda.reset_peak_memory_stats()
        model = MODELS[name]().to("cuda")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            moved = {key: one.to("cuda") for key, one in batch.items()}
            loss = step(model, moved)
            optimizer.zero_grad()
            scaled = loss / 1  # as Lightning divides by the number of batches that are accumulated
            scaled.backward()
            loss = loss.detach()
            del scaled
            del moved
            optimizer.step()
            del loss  # Lightning's loop does not keep it until the next batch
        return torch.cuda.max_memory_allocated()

    if __name__ == "__main__":
        found = {f"{model}, {batch}": peak(model, BATCHES[batch]) for model, batch in CASES}
        with open("peaks.json", "w") as file:
            json.dump(found, file)
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The variables of the script, and the peaks that it wrote in a dry run."""
    folder = tmp_path_factory.mktemp("masks")
    path = write_script(folder, SCRIPT)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert dry_run(path).fits
    return runpy.run_path(str(path)), json.loads((folder / "peaks.json").read_text())


@pytest.mark.parametrize("mask", ["no mask", "ones", "padded", "one sequence", "packed"])
@pytest.mark.parametrize("model", ["bert", "llama"])
def test_simulation_cuda_engine_and_dry_run_agree(ran, model, mask):
    script, peaks = ran
    key = f"{model}, {mask}"
    if key not in peaks:
        return
    made = script["MODELS"][model]()
    batch = script["BATCHES"][mask]
    simulated, real = (
        estimate_memory(made, batch, step=script["step"], optimizer=partial(torch.optim.SGD, lr=0.1), engine=one)
        for one in ("simulation", "cuda")
    )
    assert (simulated.engine, real.engine) == ("simulation", "cuda")
    assert (simulated.peak_allocated, simulated.peak_reserved) == (real.peak_allocated, real.peak_reserved)
    assert peaks[key] == real.peak_allocated


def test_only_what_is_padded_or_packed_gets_a_mask(ran):
    _, peaks = ran
    mask = 192 * 192 * 4  # a flag for each pair of words of each sample
    words = 192 * 4 * 8
    assert peaks["bert, padded"] - peaks["bert, ones"] >= mask
    assert abs(peaks["bert, ones"] - peaks["bert, no mask"]) <= 2 * words
    assert abs(peaks["llama, ones"] - peaks["llama, no mask"]) <= 2 * words
    assert peaks["llama, padded"] not in {peaks["llama, ones"], peaks["llama, no mask"]}
    assert peaks["llama, packed"] != peaks["llama, one sequence"]
