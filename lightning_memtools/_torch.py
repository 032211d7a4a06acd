"""Every use of torch's private parts, each with the reason why no public API serves and when it can go.

Where a docstring says that there is no public API, the use can go once there is one.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from operator import attrgetter
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, UntypedStorage, _ops, _prims_common, nn
from torch._subclasses import fake_tensor
from torch.multiprocessing import reductions
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parameter import is_lazy
from torch.optim import adadelta, adam, adamax, asgd, nadam, optimizer, radam, rmsprop, rprop, swa_utils
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils import _foreach_utils, _python_dispatch
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, dataloader

# --- fake tensors

# torch.compile and torch.export are built on them, but they have no public import.
FakeTensor = fake_tensor.FakeTensor
FakeTensorMode = fake_tensor.FakeTensorMode
NO_FAKE_KERNEL = fake_tensor.UnsupportedOperatorException, fake_tensor.DynamicOutputShapeException


def fake_mode() -> FakeTensorMode:
    """Return a mode in which new tensors are fake, and in which operators also accept real tensors.

    The mode's own cache is disabled, because this package's `RepeatedFakes` caches operator results 10x as fast.

    `copy.deepcopy` of the mode returns the mode itself. A real copy would unregister the same operators a second
    time and crash the process. This override can go once `Tensor.__deepcopy__` no longer copies a fake tensor's mode.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    mode.cache_enabled = False
    vars(mode)["__deepcopy__"] = lambda _memo: mode
    return mode


@contextmanager
def fakes_copied_deeply() -> Iterator[None]:
    """Context manager: `copy.deepcopy` gives the copy of a fake tensor its own storage, as for real tensors.

    `Tensor.__deepcopy__` copies a fake's attributes one by one, and fails on scalars that have a value. This can go
    once FakeTensor defines `__deepcopy__`.
    """
    if "__deepcopy__" in vars(FakeTensor):
        yield
        return
    fakes: Any = FakeTensor
    fakes.__deepcopy__ = _deep_copy_of_fake
    try:
        yield
    finally:
        del fakes.__deepcopy__


def _deep_copy_of_fake(fake: FakeTensor, memo: dict[int, Any]) -> Tensor:
    """Return a copy of a fake tensor with a storage of its own, even if the original shares its storage."""
    if id(fake) not in memo:
        with torch.no_grad():
            made: Tensor = fake.detach().clone()
        made = nn.Parameter(made) if isinstance(fake, nn.Parameter) else made
        memo[id(fake)] = made.requires_grad_(fake.requires_grad)
        vars(made).update({name: copy.deepcopy(vars(fake)[name], memo) for name in vars(fake).keys() - vars(made)})
        made.grad = copy.deepcopy(fake.grad, memo)
    copied: Tensor = memo[id(fake)]
    return copied


class FakeMaker:
    """Makes fake tensors from meta tensors as FakeTensor's constructor does, but in a fifth of the time.

    The constructor sets a dozen attributes one by one, which is slow; this copies them all at once from a fake tensor
    that the constructor made. This can go once the constructor is as fast.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._made: dict[torch.device, tuple[torch.device, dict[str, Any]]] = {}
        # Fakes say when someone asks where their values lie.
        guards = torch._C._set_throw_on_mutable_data_ptr, torch._C._set_warn_deprecated_on_mutable_data_ptr
        self._guard = guards[mode._allow_unsafe_data_ptr_access]

    def __call__(self, meta: torch.Tensor, device: torch.device) -> FakeTensor:
        """Return a fake tensor that has the shape of a meta tensor and appears to be on `device`."""
        if device not in self._made:
            fake = FakeTensor(self._mode, meta, device)
            self._made[device] = fake.fake_device, dict(vars(fake))
            return fake
        known, attributes = self._made[device]
        fake = torch.Tensor._make_subclass(
            FakeTensor, meta, meta.requires_grad, dispatch_device=True, device_for_backend_keys=known
        )
        self._guard(fake)
        vars(fake).update(attributes)
        return fake

    def number(self, value: torch.Tensor) -> FakeTensor:
        """Return a fake scalar with a readable value, like the one that FakeTensorMode makes for `torch.tensor(3)`."""
        with without_torch_dispatch():
            kept = value.clone()
            fake = self(torch.empty((), dtype=kept.dtype, device="meta"), kept.device)
        fake.constant = kept
        self._mode.fake_tensor_converter.set_tensor_memo(kept, fake)
        self._mode.fake_tensor_converter.add_constant_storage_mapping(fake)
        return fake


# --- modules

# The public classes have no public base; a user's own may derive from the private one directly.
AnyBatchNorm = _BatchNorm
StatisticsNorm = _NormBase  # BatchNorm and InstanceNorm
AnyDropout = _DropoutNd

# Where a module keeps its parts. The public methods return copies; this is for finding who refers to a tensor.
MODULE_REGISTERS = frozenset({"_parameters", "_buffers", "_modules"})

# Where a tensor keeps the functions given to `register_hook`; nothing public lists them.
BACKWARD_HOOKS = "_backward_hooks"


def has_accumulation_hook(parameter: nn.Parameter) -> bool:
    """Return whether a parameter has `register_post_accumulate_grad_hook` hooks; no public API lists them."""
    return bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def registered_children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name, child) for each child of a module; a child with two names is yielded under both."""
    return ((name, child) for name, child in module._modules.items() if child is not None)


def iterates_power(module: nn.Module) -> bool:
    """Return whether a module has spectral norm, which updates vectors of its own in each forward pass of training.

    It is found by the private class of its hook (torch.nn.utils.spectral_norm) or parametrization (its successor).
    """
    candidates = (module, *module._forward_pre_hooks.values())
    return any(type(one).__name__ in {"SpectralNorm", "_SpectralNorm"} for one in candidates)


def hooks_of(module: nn.Module) -> list[Any]:
    """Return the forward and backward hooks of a module itself; there is no public API to list them."""
    kinds: list[Any] = [
        module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    ]  # fmt: skip
    return [hook for hooks in kinds for hook in hooks.values()]


def compiled_call(module: nn.Module) -> Any:
    """Return the compiled function that a module calls after `module.compile()`, or None. No public API gives it."""
    return getattr(module, "_compiled_call_impl", None)


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the dict of a module's own buffers, including None entries, which `named_buffers` skips."""
    return module._buffers


# --- nested containers

# The only pytree that torch's own transforms and `checkpoint` share; it can go when torch.utils.pytree is released.
tree_flatten = pytree.tree_flatten
tree_unflatten = pytree.tree_unflatten
tree_leaves = pytree.tree_leaves
tree_map_only = pytree.tree_map_only


# --- tensors


# Returns the identity of a storage: equal for all views of it, and unique among the living. `data_ptr` is 0 for all
# fake and all empty tensors, and every call of `untyped_storage` makes a new Python object. This can go when storages
# have a public identity. It is called for every tensor of every operator, so there is no Python function around it.
storage_id: Callable[[UntypedStorage], int] = attrgetter("_cdata")
StorageWeakRef = reductions.StorageWeakRef  # says whether a storage is gone, whose id others may have then


def tensor_without_memory(cls: Any, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Any:
    """Return a tensor of the subclass `cls` that has a shape but no memory; there is no public API for this."""
    return Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)


def is_view(tensor: Tensor) -> bool:
    """Return whether autograd tracks a tensor as a view, which keeps its base alive."""
    return tensor._is_view()


# Returns how often a tensor was written in place: only autograd's version counter tells. It is asked for all parameters
# in each step, so there is no Python function around it.
write_count: Callable[[Tensor], int] = attrgetter("_version")


def write_count_or_none(tensor: Tensor) -> int:
    """Return a tensor's version counter; -1 for inference tensors and uninitialized parameters, which have none."""
    return -1 if is_lazy(tensor) or tensor.is_inference() else tensor._version


# --- autograd


def node_sequence_number(node: Any) -> int:
    """Return the sequence number of an autograd node, higher for nodes created later; there is no public API."""
    number: int = node._sequence_nr()
    return number


def autograd_sequence_number() -> int:
    """Return the sequence number that autograd gives to the next operator; the profiler shows it only afterwards."""
    return torch._C._autograd._get_sequence_nr()


# --- data loaders and schedulers


def loader_with_batch_sampler(loader: DataLoader[Any], batch_sampler: Any, size: int | None) -> DataLoader[Any]:
    """Return a shallow copy of a loader, with another batch sampler and batch size.

    DataLoader refuses assignments to these attributes, because a running iterator would not notice; the copy has no
    iterator. Constructing a new loader would lose the arguments and attributes that a subclass adds.
    """
    new = copy.copy(loader)
    vars(new).update(batch_sampler=batch_sampler, batch_size=size, _iterator=None)
    return new


# --- torch.distributed

_COLLECTIVES = (
    "allreduce", "allreduce_coalesced", "allgather", "_allgather_base", "allgather_into_tensor_coalesced",
    "allgather_coalesced", "alltoall", "alltoall_base", "barrier", "monitored_barrier", "broadcast", "gather", "reduce",
    "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "scatter", "send", "recv",
    "recv_anysource",
    # The names of torch 2.13.
    "all_gather_single", "all_gather_single_coalesced", "all_to_all_single", "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
)  # fmt: skip


@contextmanager
def replaced_collectives(replacement: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Context manager: replace each collective of all process groups with `replacement(name, original)`.

    This replaces methods of ProcessGroup, some of them private. Every function of torch.distributed calls them, even
    if it was imported by name. This can go once torch.distributed has a public hook for collectives.
    """
    group: Any = torch.distributed.ProcessGroup
    # As they are in the class: getattr would return functions, which do not become methods again.
    originals = {name: vars(group)[name] for name in _COLLECTIVES if name in vars(group)}
    try:
        for name, original in originals.items():
            setattr(group, name, replacement(name, original))
        yield
    finally:
        for name, original in originals.items():
            setattr(group, name, original)


def in_backward() -> bool:
    """Return whether a backward pass is running in this thread; there is no public API."""
    running: bool = torch._C._current_graph_task_id() != -1
    return running


def node_in_backward() -> int:
    """Return the sequence number of the autograd node that is running; -1 outside backward. No public API."""
    node: Any = torch._C._current_autograd_node()
    return -1 if node is None else int(node._sequence_nr())


def saved_reduction(node: Any) -> int | None:
    """Return a loss function's `reduction` from its autograd node (2 is "sum"); None for other nodes. No public API."""
    return getattr(node, "_saved_reduction", None)


def output_shape(node: Any) -> tuple[int, ...] | None:
    """Return the shape of the first tensor that an autograd node's operator returned; None if unknown."""
    return tuple(outputs[0].shape) if (outputs := getattr(node, "_input_metadata", None)) else None


# --- tensors and operators

# The only way to see every operator of a step, backward included; torch's documentation calls it a stable extension
# point, but has no public module for it.
DispatchMode = _python_dispatch.TorchDispatchMode


def saved_tensors_of(node: Any) -> Iterator[Tensor]:
    """Yield the tensors that an autograd node has saved, except freed ones and those packed by saved-tensor hooks.

    Only nodes of functions defined in Python have `node.saved_tensors`. This can go once every node has it.
    """
    for name in dir(node):
        if not name.startswith("_raw_saved_"):
            continue
        with suppress(RuntimeError):  # they were freed
            raw = getattr(node, name)
            for one in raw if isinstance(raw, (list, tuple)) else (raw,):
                # As it is: `unpack` refuses some results. Versions without these attributes may have hooks.
                found = getattr(one, "data", None) if getattr(one, "unpack_hook", one) is None else None
                if isinstance(found, Tensor):
                    yield found


def has_readable_values(tensor: Tensor) -> bool:
    """Return whether a tensor's values can be read: some tensors have no memory, and reading them fails or crashes.

    FSDP frees the storage of tensors that still exist, and sparse tensors keep their values in other tensors. The
    gradients of double backward can be ZeroTensors, on which `isfinite` crashes; only a private method detects them.
    """
    if isinstance(tensor, FakeTensor) or is_lazy(tensor) or tensor.is_meta or tensor._is_zerotensor():
        return False
    if tensor.layout is not torch.strided or tensor.is_nested:
        return True
    try:
        return tensor.untyped_storage().nbytes() > 0 or tensor.numel() == 0
    except (RuntimeError, NotImplementedError):
        return True  # a subclass with values elsewhere


def is_in_memory(tensor: Tensor) -> bool:
    """Return whether a tensor's values lie in its own strided memory, so that copying the memory copies the tensor."""
    if tensor.layout is not torch.strided or tensor.is_quantized or not has_readable_values(tensor):
        return False
    # A class with a dispatch of its own may keep its values anywhere.
    return not tensor.is_nested and type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__


def without_subclass(tensor: Tensor) -> Tensor:
    """Return a detached view as a plain Tensor. Methods of a user's subclass may need attributes that views lack."""
    with torch._C.DisableTorchFunctionSubclass():
        return Tensor.detach(tensor)


def copy_each(to: list[Tensor], from_: list[Tensor]) -> None:
    """Copy each tensor of `from_` into that of `to` with the same index, in few kernels. No public function does."""
    torch._foreach_copy_(to, from_)


def flattened(tensors: list[Tensor]) -> Tensor:
    """Concatenate the elements of tensors of one dtype into a 1-D tensor, without a Python loop over the tensors."""
    return torch._C._nn.flatten_dense_tensors(tensors)


def l2_norm_of_each(tensors: list[Tensor], dtype: torch.dtype | None) -> Sequence[Tensor]:
    """Return the L2 norm of each tensor, in one kernel; the public `get_total_norm` returns only the overall norm."""
    return list(torch._foreach_norm(tensors, 2, dtype=dtype))


def operator_schema(operator: Any) -> Any:
    """Return an operator's schema, which says what types it returns and which arguments it writes to. No public API."""
    return operator._schema


LIFT_FRESH = torch.ops.aten.lift_fresh.default  # the operator with which `torch.tensor` ends
LOCAL_SCALAR = torch.ops.aten._local_scalar_dense.default  # the operator that `.item()` runs
# The functions behind `pack_padded_sequence` and `pad_packed_sequence`, which read lengths without an operator.
LAYER_FUNCTIONS: Any = torch._VF  # torch.nn calls `lstm` and the like by it
PACK_PADDED, PAD_PACKED = LAYER_FUNCTIONS._pack_padded_sequence, LAYER_FUNCTIONS._pad_packed_sequence
DEVICE_OF = torch.ops.prim.device.default  # torch's own code asks with it for a fake tensor's device, all the time


def takes_scaled_gradients(optimizer: Any) -> bool:
    """Return whether an optimizer's kernels unscale gradients themselves, so that GradScaler leaves this to them."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


# --- memory


def record_cuda_history(max_entries: int, *, stacks: bool = True) -> None:
    """Start recording the requests to the CUDA allocator. If already recording, only turn stack traces on or off.

    Stack traces are recorded only for allocations, and only with Python frames. With C++ frames, writing a snapshot
    takes minutes (torchtitan measured 461 s instead of 4 s). torch documents the function, but its name is private.

    Raises:
        RuntimeError: The allocator is not torch's own, but cudaMallocAsync or a pluggable one, which keeps no history.
    """
    torch.cuda.memory._record_memory_history("all", "alloc" if stacks else None, "python", max_entries)


def stop_cuda_history() -> None:
    """Stop recording the CUDA allocator's history, by a function of torch that is documented but has a private name."""
    torch.cuda.memory._record_memory_history(enabled=None)


def is_cuda_history_recorded() -> bool:
    """Return whether the CUDA allocator's history is already being recorded; there is no public API to ask.

    Raises:
        RuntimeError: The allocator is not torch's own.
    """
    enabled: bool = torch._C._cuda_isHistoryEnabled()
    return enabled


def label_cuda_memory(label: str) -> None:
    """Label all later allocations in the recorded history. torch documents the function, but its name is private.

    Does nothing in versions of torch without labels.
    """
    set_label: Callable[[str], None] | None = getattr(torch.cuda.memory, "_set_memory_metadata", None)
    if set_label is not None:
        set_label(label)


def cuda_memory_snapshot() -> dict[str, Any]:
    """Return the CUDA memory snapshot. torch documents the function, but its name is private.

    torch 2.13 imports its compiler here in order to look up generated code. The import takes 2 s. If the compiler was
    not imported before, there is no generated code, so a placeholder module stands in for it.
    """
    placeholder = None if "torch._inductor" in sys.modules else ModuleType("torch._inductor")
    if placeholder is not None:
        vars(torch)["_inductor"] = placeholder
    try:
        snapshot: dict[str, Any] = torch.cuda.memory._snapshot()
    finally:
        if placeholder is not None and vars(torch).get("_inductor") is placeholder:
            del vars(torch)["_inductor"]
    return snapshot


KEEPS_CUBLAS_WORKSPACES = torch.__version__ < "2.15"
"""True if a workspace of cuBLAS stays allocated after the first product; from torch 2.15 on, each product takes one."""


def attach_cuda_oom_observer(observer: Callable[[int, int, int, int], object]) -> None:
    """Make the CUDA allocator call `observer` before it raises an out-of-memory error.

    torch has no public hook for this. The observer cannot be detached.

    Raises:
        RuntimeError: The allocator is not torch's own.
    """
    attach: Any = torch._C._cuda_attach_out_of_memory_observer  # type: ignore[attr-defined]
    attach(observer)


# --- what is running


def default_process_group_store() -> Any:
    """Return the store that the default process group was created with; there is no public API for this.

    Raises:
        ValueError: There is no process group.
    """
    return torch.distributed.distributed_c10d._get_default_store()


# --- the gradients that DistributedDataParallel averages over the ranks


class SilentGroup(torch.distributed.ProcessGroup if torch.distributed.is_available() else object):  # type: ignore[misc]
    """A process group whose all-reduces return at once and change nothing; `n_all_reduces` counts them.

    A collective returns a Work object, which has no public constructor. Remove this class once Work has one.
    """

    def __init__(self, like: Any) -> None:
        super().__init__(like.rank(), like.size())
        self.n_all_reduces = 0

    def allreduce(self, tensors: list[Tensor], _options: Any = None) -> Any:
        """Count the call, and return a finished Work object whose result is the unchanged tensors."""
        self.n_all_reduces += 1
        from torch._C import _distributed_c10d  # noqa: PLC0415, may not be built in

        devices: Any = list({tensor.device for tensor in tensors if tensor.device.type != "cpu"})
        done: Any = torch.futures.Future(devices=devices)
        done.set_result(tensors)
        made: Any = _distributed_c10d
        return made._create_work_from_future(done)


@contextmanager
def reduces_over(wrapper: nn.parallel.DistributedDataParallel, group: Any) -> Iterator[None]:
    """Context manager: DDP averages gradients over another process group with the same number of ranks.

    DDP has no temporary switch. This is used to end a failed backward pass, and can go once torch has an API for that.
    """
    wrapper.reducer._update_process_group(group)
    try:
        yield
    finally:
        wrapper.reducer._update_process_group(wrapper.process_group)


def expect_gradients(wrapper: nn.parallel.DistributedDataParallel) -> None:
    """Make DDP average the gradients of the next backward pass, even if no forward pass went through DDP before."""
    wrapper.reducer.prepare_for_backward([])


def buckets_of(wrapper: nn.parallel.DistributedDataParallel) -> list[list[nn.Parameter]]:
    """Return the parameters of each of DDP's gradient buckets, in the order in which DDP averages the buckets.

    This calls a private method, which briefly allocates as much memory as all gradients take.
    """
    buckets: Any = wrapper.reducer._get_zeros_like_grad_buckets()
    return [list(bucket.parameters()) for bucket in buckets]


def forget_gradient_order(wrapper: nn.parallel.DistributedDataParallel) -> None:
    """Make DDP forget the order in which gradients became ready, so that the first backward pass can run again.

    DDP records this order in the first pass, and raises if it is recorded twice. Later passes record nothing.
    """
    if not wrapper._has_rebuilt_buckets:
        wrapper.reducer._reset_state()


def has_gradient_hook(wrapper: nn.parallel.DistributedDataParallel) -> bool:
    """Return whether DDP has a communication hook, which then averages the gradients; no public API shows it."""
    return bool(wrapper._comm_hooks)


# --- ranks that are pretended, for a dry run


@contextmanager
def pretended_ranks(rank: int, world_size: int) -> Iterator[None]:
    """Context manager: this process acts as one of several ranks. Collectives return only this rank's own values.

    Tensors use torch's private "fake" backend, which moves no data. Functions that exchange Python objects cannot
    work with it, so they are monkeypatched. This can go once torch has a public single-process backend.
    """
    from torch import distributed  # noqa: PLC0415, may not be built in
    from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC0415, registers the backend

    init, new_group = distributed.init_process_group, distributed.new_group

    def init_process_group(*_args: Any, **_options: Any) -> None:
        init(backend="fake", store=FakeStore(), rank=rank, world_size=world_size)

    def group(ranks: Any = None, *_args: Any, **_options: Any) -> Any:
        return new_group(ranks, backend="fake")

    def all_gather_object(objects: list[Any], mine: Any, group: Any = None) -> None:
        del group
        objects[:] = [mine] * len(objects)

    def nothing(*_args: Any, **_options: Any) -> None:
        """Stand in for a collective: do nothing, so that its tensors keep this rank's own values."""

    def keep_gradients(_state: Any, bucket: Any) -> Any:
        done: Any = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    # The result of a fake all-reduce is None, and DDP expects the bucket. It also reads annotations, as types.
    keep_gradients.__annotations__.clear()
    wrapper = nn.parallel.DistributedDataParallel
    make, register = wrapper.__init__, wrapper.register_comm_hook

    def make_with_hook(self: Any, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        register(self, None, keep_gradients)

    exchanges: dict[str, Callable[..., Any]] = {
        "init_process_group": init_process_group,
        "new_group": group,
        "all_gather_object": all_gather_object,
        "broadcast_object_list": nothing,
        "monitored_barrier": nothing,
    }
    replaced: list[tuple[Any, str, Any]] = [
        *((module, *one) for module in (distributed, distributed.distributed_c10d) for one in exchanges.items()),
        (distributed.ProcessGroup, "monitored_barrier", nothing),  # which Lightning calls around prepare_data
        # DDP compares the shapes of all ranks' parameters, and there are none but this rank's.
        (nn.parallel.distributed, "_verify_param_shape_across_processes", nothing),
        (wrapper, "__init__", make_with_hook),
        (wrapper, "register_comm_hook", nothing),
    ]
    before = [(holder, name, getattr(holder, name)) for holder, name, _ in replaced]
    for holder, name, function in replaced:
        setattr(holder, name, function)
    try:
        yield
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()
        for holder, name, function in before:
            setattr(holder, name, function)


def is_fsdp_module(module: nn.Module) -> bool:
    """Return whether `fully_shard` was applied to a module. This checks the class name: torch may lack FSDP."""
    return any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)


def free_gathered_parameters(model: nn.Module) -> bool:
    """Free the parameters that FSDP (`fully_shard`) has gathered; return whether the model has any FSDP modules."""
    sharded: list[Any] = [module for module in model.modules() if is_fsdp_module(module)]
    for module in sharded:
        module.reshard()
    return bool(sharded)


@contextmanager
def without_sharding_hooks(model: nn.Module) -> Iterator[None]:
    """Context manager: remove the hooks with which FSDP (`fully_shard`) gathers and frees parameters.

    There is no public API for this: hooks can only be removed by the code that added them.
    """
    noted = []
    for module in model.modules():
        if is_fsdp_module(module):
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                noted.append((hooks, hooks.copy()))
                for key, hook in list(hooks.items()):
                    if str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp"):
                        del hooks[key]
    try:
        yield
    finally:
        for hooks, before in noted:
            hooks.clear()
            hooks.update(before)


# --- operators

suggest_memory_format = _prims_common.suggest_memory_format  # of a tensor's strides, as c10 does
OpOverload = _ops.OpOverload  # what `torch.ops.aten.add.Tensor` is an instance of
is_wrapper_subclass = _python_dispatch.is_traceable_wrapper_subclass
without_dispatch_modes = _python_dispatch._disable_current_modes
kernels_of_meta_tensors = fake_tensor.in_kernel_invocation_manager  # for fakes, as their mode runs these
without_torch_dispatch = torch._C._DisableTorchDispatch  # the same in a microsecond, within a mode's handler
without_torch_function = torch._C.DisableTorchFunction  # no mode of functions and no subclass sees the code within


class OperatorMode(DispatchMode):  # type: ignore[no-untyped-call]
    """A `DispatchMode` whose `__torch_dispatch__` torch calls directly, not through `torch._disable_dynamo`.

    That wrapper loads the compiler, and takes a third of an operator's time in a mode that tracks memory. It is not
    needed, because nothing is compiled while these modes are active.
    """

    # torch asks every mode for a rule on each higher-order operator (flex_attention, say); one rule serves here.
    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def run_composite(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a composite operator through its C++ implementation, which calls other operators.

    The public `decompose` prefers decompositions in Python, which round results differently.
    """
    return operator._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def has_kernel(operator: str, key: str) -> bool:
    """Return whether an operator, such as "aten::add", has a kernel for a dispatch key; there is no public API."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator, key)


def operator_names() -> list[str]:
    """Return the names of all operators and overloads; `dir(torch.ops.aten)` lists only operators already used."""
    return torch._C._dispatch_get_all_op_names()


def without_autocast_on_cpu() -> Any:
    """Return a context manager in which operators skip their CPU autocast kernels; there is no public API."""
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU))


def remove_kernels(library: Any) -> None:
    """Remove the kernels that a `torch.library.Library` added; otherwise they stay until it is garbage-collected."""
    library._destroy()


# --- what autograd is doing, called for every operator and so without a function around it

# The number of the backward pass that this thread runs, or -1; and the node whose formula runs. Hooks, the public way,
# would have to be put on every node.
current_graph_task = torch._C._current_graph_task_id
current_autograd_node = torch._C._current_autograd_node
AccumulateGrad: Any = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]


def stores_gradient() -> bool:
    """Return whether this thread is running an AccumulateGrad node, the autograd node that adds to a `.grad`."""
    return current_graph_task() != -1 and isinstance(current_autograd_node(), AccumulateGrad)


# The function that `backward` and `torch.autograd.grad` call to run the engine, and the name of the attribute.
ENGINE_RUN = torch.autograd, "_engine_run_backward"


def kept_in_backward(mode: TorchFunctionMode) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that keeps a TorchFunctionMode active while the decorated function runs a backward pass.

    When the mode intercepts `Tensor.backward`, torch turns the mode off. Without this decorator, layers recomputed in
    the backward pass would run without the mode. No public API tells whether a mode is off.
    """

    def make(run: Callable[..., Any]) -> Callable[..., Any]:
        def run_with_mode(*args: Any, **kwargs: Any) -> Any:
            if mode in _get_current_function_mode_stack():  # type: ignore[no-untyped-call]
                return run(*args, **kwargs)
            TorchFunctionMode.__enter__(mode)  # type: ignore[no-untyped-call]
            try:
                return run(*args, **kwargs)
            finally:
                TorchFunctionMode.__exit__(mode, None, None, None)  # type: ignore[no-untyped-call]

        return run_with_mode

    return make


# --- parts of tensors and modules


def uncoalesced_parts(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices and values of a sparse COO tensor; the public methods refuse uncoalesced tensors."""
    return tensor._indices(), tensor._values()


def own_tensors(module: nn.Module) -> tuple[Any, Any]:
    """Return a module's own parameters and buffers, including None entries; public iterators take 10x as long."""
    return module._parameters.values(), module._buffers.values()


# --- data loaders

# What iterates a DataLoader, in this process or with workers: batches can be counted only where they are yielded.
LoaderIterator = dataloader._BaseDataLoaderIter
WorkerLoaderIterator = dataloader._MultiProcessingDataLoaderIter


# --- the path that CUDA tensors take

# Where torch.nn.functional takes dropout from, and where optimizers look up which devices foreach serves.
DROPOUT_NAMESPACES = (torch, torch._VF)
FOREACH_DEVICE_LOOKUPS = [
    (module, "_get_foreach_kernels_supported_devices") for module in (optimizer, _foreach_utils, swa_utils)
]
FOREACH_TENSOR_TYPES = [(module, "_foreach_supported_types") for module in (optimizer, _foreach_utils)]
# Where each optimizer looks up on which devices `capturable=True` is possible.
CAPTURABLE_DEVICE_LOOKUPS = [
    (module, "_get_capturable_supported_devices")
    for module in (adadelta, adam, adamax, asgd, nadam, radam, rmsprop, rprop)
]


# --- the compiler, logging, autocast


def is_compiler_loaded() -> bool:
    """Return whether torch's compiler is loaded; anything public in torch.compiler would load it."""
    return "torch._dynamo" in sys.modules


def has_compiled() -> bool:
    """Return whether torch.compile has compiled anything in this process. There is no public API for this."""
    return is_compiler_loaded() and bool(sys.modules["torch._dynamo.utils"].counters["frames"])


def uncompiled(module: nn.Module) -> nn.Module:
    """Return the module inside a `torch.compile` wrapper, or any other module unchanged; there is no public API."""
    inner = getattr(module, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else module


# Where torch logs a traceback of its own for a wrong shape.
FAKE_TENSOR_LOGGER = fake_tensor.__name__

# Operators without a public name among those that autocast computes in float32 (AT_FORALL_FP32).
INTERPOLATIONS_IN_FLOAT = [f"_upsample_nearest_exact{n}d" for n in (1, 2, 3)]
INTERPOLATIONS_IN_FLOAT += ["_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"]
