"""For error messages: names of NumPy, SciPy, JAX, MPI and torch, and what to write here instead.

Three tables: values of options (`closest`), keywords of functions (`keyword`) and names of modules (`instead`).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable

import numpy as np

from spmd.errors import nearest

__all__ = ["INSTEAD", "KEYWORDS", "UNKNOWN_KEYWORDS", "VALUES", "closest", "instead", "keyword", "public_name"]

VALUES: dict[str, str] = {
    # boundaries
    "periodic": "wrap circular cyclic grid-wrap torus",
    "zero": "constant zeros grid-constant fill dirichlet",
    "edge": "nearest replicate replication border clamp clip neumann extend symmetric",
    "reflect": "mirror reflection reflect101",
    "none": "valid open empty no off",
    # schedulers, transports, devices
    "lockstep": "greenlet greenlets sequential serial synchronous sync cooperative single-threaded deterministic",
    "threads": "thread threading threadpool multithreading multithreaded parallel concurrent",
    "auto": "default automatic",
    "local": "virtual single inprocess in-process process thread threads simulated",
    "mpi": "mpi4py mpich openmpi ompi intelmpi mpiexec",
    "torch": "gloo torchrun c10d pytorch torch.distributed distributed",
    "nccl": "rccl cuda gpu",
    "cpu": "host numpy",
    "cuda": "gpu cupy nvidia cuda:0",
    # reductions, and how copies agree
    "sum": "add + total psum batchsum",
    "mean": "avg average pmean elementwise_mean batchmean",
    "broadcast": "bcast sync copy rank0",
    "verify": "check compare assert equal",
    # schedules of pipelines
    "gpipe": "schedulegpipe fill-drain fill_drain afab all_forward_all_backward",
    "1f1b": "schedule1f1b one_forward_one_backward pipedream pipedream-flush pipedream_flush dapple",
    "interleaved": "scheduleinterleaved1f1b interleaved_1f1b interleaved1f1b looped virtual vpp",
    "zero_bubble": "scheduleinterleavedzerobubble zerobubble zero-bubble zb zb1p zb-h1 zbh1 zb_h1",
    # states
    "varying": "vary varied v sharded split",
    "invariant": "invarying unvarying replicated replicate reduced i",
    # interpolation, activations
    "nearest": "nearest-exact nearest_exact 0",
    "linear": "bilinear trilinear triangle 1",
    "cubic": "bicubic tricubic spline 3",
    "silu": "swish",
    "hard_swish": "hardswish hard_silu",
    "hard_sigmoid": "hardsigmoid",
    "leaky_relu": "leakyrelu lrelu",
    "gelu_tanh": "gelu_approximate gelu_new",
    "tanh": "approximate",
    # arrays of tests
    "integers": "int ints integer",
    "normal": "gaussian randn float",
    "distinct": "arange unique",
}
"""For a value of an option, the spellings of other libraries."""

KEYWORDS: tuple[str, ...] = (
    "maxiter iter_lim max_iter max_iters maxit maxiters niter n_iter num_iters iterations max_steps steps",
    "rtol tol reltol relative_tolerance",
    "atol abstol absolute_tolerance tol",
    "x0 x_init init_x initial_guess",
    "M preconditioner prec",
    "axis dim dims axes",
    "keepdims keepdim",
    "axis_name axis_names group comm process_group pg mesh_dim",
    "learning_rate lr step_size stepsize",
    "b1 beta1 beta_1",
    "b2 beta2 beta_2",
    "eps epsilon",
    "weight_decay wd decay",
    "in_specs in_axes in_shardings in_sharding in_layouts",
    "out_specs out_axes out_shardings out_sharding out_layouts",
    "check check_rep check_vma",
    "f fun func fn function body",
    "fun f func fn",
    "argnums argnum wrt",
    "shape size",
    "dtype type",
    "key rng seed generator rngs",
    "p prob probs probability keep_prob",
    "rate p dropout_rate",
    "root src dst",
    "boundary mode padding_mode bc",
    "method mode interpolation order",
    "widths width halo pad_width depth overlap",
    "spec sharding partition_spec placements",
    "kind activation nonlinearity",
    "alpha negative_slope slope",
    "negative_slope alpha slope",
    "label_smoothing smoothing",
    "ignore_index ignore",
    "labels targets target y",
    "window kernel_size window_shape pool_size",
    "stride strides window_strides step",
    "padding pad",
    "dilation dilations rhs_dilation",
    "groups feature_group_count num_groups",
    "weight scale gamma",
    "bias offset beta",
    "classes num_classes depth n",
    "ids indices input_ids",
    "max_norm clip_norm max_norm_value",
    "steps decay_steps total_steps T_max num_steps",
    "warmup warmup_steps",
    "scheduler schedule",
    "transport backend engine",
    "device platform",
    "axis_name batch_axis_name",
)
"""Keywords of the same meaning; the first of each line is the library's."""

UNKNOWN_KEYWORDS: dict[str, str] = {
    "axis_index_groups": "leave it out: two axes of the mesh, Mesh(outer=2, inner=2), name groups of workers",
    "async_op": "leave it out: a collective gives its result",
    "op": "leave it out: spmd.psum, spmd.pmean, spmd.pmax and spmd.pmin are functions of their own",
    "out": "leave it out: results are new arrays",
    "out_sharding": "leave it out: out_specs of spmd.map say how results are laid out",
    **dict.fromkeys(("static_argnums", "static_argnames"), "leave it out: in_specs of None pass arguments as they are"),
    "donate_argnums": "leave it out: update(..., donate=True) of spmd.optim gives memory away",
    "vectorized": "leave it out: spmd.jacrev and spmd.jacfwd need no vmap",
    "inplace": "leave it out: results are new arrays",
    **dict.fromkeys(("axis_names", "auto"), "leave it out: a map runs on all axes of its mesh"),
    "callback": "leave it out: residuals of the result are the history",
    "show": "leave it out: reason and residuals of the result say what happened",
    "calc_var": "leave it out: no variances are estimated",
}
"""Keywords of other libraries that no function has, and the remedy."""

INSTEAD: dict[str, dict[str, str]] = {
    "spmd": {
        # JAX
        "vmap": "write f for arrays of one dimension more, as NumPy broadcasts; spmd.map splits it over workers",
        **dict.fromkeys(("pmap", "xmap"), 'spmd.map(f, P("x"), P("x"))'),
        **dict.fromkeys(("shard_map", "smap"), "spmd.map(f, in_specs, out_specs, mesh=mesh)"),
        "pjit": "spmd.jit(spmd.map(f, in_specs, out_specs))",
        "device_put": "spmd.put(x, spec)",
        "device_get": "x.numpy()",
        "make_array_from_callback": "spmd.from_callback(shape, spec, callback)",
        "make_array_from_single_device_arrays": "spmd.from_blocks(blocks, spec)",
        "block_until_ready": "leave it out: results are there when a map returns",
        "remat": "spmd.checkpoint(f)",
        "lax": "collectives are spmd.psum and its kin; loops and branches are Python's",
        "switch": "spmd.cond of one of two functions; or if of Python on a value that is the same on all workers",
        "select": "np.where(mask, x, y)",
        "nn": "spmd.functions",
        "eval_shape": "call the function: shapes follow from the blocks",
        "make_jaxpr": "spmd.jit(f).text()",
        "PartitionSpec": 'spmd.P("x", None)',
        **dict.fromkeys(("NamedSharding", "PositionalSharding"), 'spmd.put(x, spmd.P("x"), mesh)'),
        "Sharding": "spmd.Layout",
        "with_sharding_constraint": "spmd.repartition(x, src, dst) in a body, spmd.reshard(x, spec) outside",
        **dict.fromkeys(("set_mesh", "use_mesh"), "with mesh:"),
        "AbstractMesh": "spmd.Mesh(x=2)",
        "tree_map": "spmd.tree.map(f, tree)",
        "tree_util": "spmd.tree",
        "tree_leaves": "spmd.tree.leaves(tree)",
        "tree_flatten": "spmd.tree.flatten(tree)",
        "tree_unflatten": "spmd.tree.unflatten(structure, leaves)",
        "process_index": "spmd.is_main(), or spmd.worker_index(axis_name) in a body",
        "process_count": "mesh.size, or spmd.axis_size(axis_name) in a body",
        "device_count": "mesh.size",
        "local_device_count": "len(mesh.local_workers)",
        **dict.fromkeys(("devices", "local_devices"), "spmd.info()"),
        "pbroadcast": "spmd.broadcast(x, axis_name, root), then spmd.replicate for one value",
        "pgather": "spmd.all_gather(x, axis_name)",
        **dict.fromkeys(("psend", "precv"), "spmd.sendrecv(x, axis_name, source, dest)"),
        "pdot": "spmd.psum(a @ b, axis_name)",
        "ensure_compile_time_eval": "leave it out: bodies run as they are",
        "custom_gradient": "spmd.custom_vjp",
        "closure_convert": "leave it out: pass what is differentiated as an argument",
        "named_scope": "leave it out: errors name lines of the source",
        **dict.fromkeys(("pure_callback", "io_callback"), "call the function, on spmd.block(x)"),
        "debug_nans": "spmd.debug(nans=True)",
        # MPI
        **dict.fromkeys(("allreduce", "Allreduce"), "spmd.psum(x, axis_name)"),
        **dict.fromkeys(("bcast", "Bcast"), "spmd.broadcast(x, axis_name, root)"),
        **dict.fromkeys(("reduce", "Reduce"), "spmd.sum_reduce(x, axis_name, root)"),
        **dict.fromkeys(("allgather", "Allgather"), "spmd.all_gather(x, axis_name)"),
        "Allgatherv": "spmd.all_gather(x, axis_name, tiled=True), of uneven blocks too",
        **dict.fromkeys(("alltoall", "Alltoall"), "spmd.all_to_all(x, axis_name, split_axis, concat_axis)"),
        "Alltoallv": "spmd.ragged_all_to_all",
        "Scatter": "spmd.scatter(x, axis_name)",
        "Gather": "spmd.gather(x, axis_name)",
        **dict.fromkeys(
            ("send", "recv", "isend", "irecv"), "spmd.sendrecv(x, axis_name, source, dest): both workers call it"
        ),
        **dict.fromkeys(("barrier", "Barrier"), "leave it out: collectives wait for each other"),
        **dict.fromkeys(("rank", "Get_rank"), "spmd.worker_index(axis_name)"),
        **dict.fromkeys(("size", "Get_size"), "spmd.axis_size(axis_name)"),
        "COMM_WORLD": "spmd.Mesh(x=4) is a grid of the workers; comm=MPI.COMM_WORLD makes one of an MPI communicator",
        "comm": "spmd.Mesh(comm=comm, x=4)",
        "reduce_scatter": "spmd.psum_scatter(x, axis_name)",
        # torch and torch.distributed
        "all_reduce": "spmd.psum(x, axis_name)",
        "all_gather_into_tensor": "spmd.all_gather(x, axis_name, tiled=True)",
        "all_gather_object": "spmd.map with the out_spec None returns objects; in a body spmd.all_gather of arrays",
        "reduce_scatter_tensor": "spmd.psum_scatter(x, axis_name, tiled=True)",
        "all_to_all_single": "spmd.all_to_all(x, axis_name, 0, 0, tiled=True)",
        "get_rank": "spmd.worker_index(axis_name)",
        "get_world_size": "spmd.axis_size(axis_name)",
        "init_process_group": "spmd.Mesh(x=4): it finds the processes that a launcher started",
        "new_group": "an axis of the mesh: Mesh(outer=2, inner=2) has groups of 2 along each",
        **dict.fromkeys(("init_device_mesh", "DeviceMesh"), "spmd.make_mesh((2, 2), ('data', 'model'))"),
        "DTensor": "spmd.put(x, spec), a PartitionedArray",
        "distribute_tensor": "spmd.put(x, spec)",
        "Shard": 'spmd.P("x") splits dimension 0 over axis x',
        "Replicate": "spmd.P() replicates",
        "no_grad": "spmd.stop_gradient(x)",
        "backward": "spmd.grad(f)(x)",
        "jacobian": "spmd.jacrev(f), or spmd.jacfwd(f)",
        "elementwise_grad": "spmd.vjp(f, x)[1](np.ones_like(y))",
    },
    "spmd.functions": {
        "tanh": "np.tanh(x)",
        **dict.fromkeys(("hardtanh", "hard_tanh"), "np.clip(x, -1, 1)"),
        **dict.fromkeys(("softsign", "soft_sign"), "x / (1 + np.abs(x))"),
        **dict.fromkeys(("conv1d", "conv2d", "conv3d", "conv_general_dilated"), "spmd.functions.conv(x, w)"),
        **dict.fromkeys(
            ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), "spmd.functions.conv_transpose(x, w)"
        ),
        **dict.fromkeys(("max_pool1d", "max_pool2d", "max_pool3d"), "spmd.functions.max_pool(x, window)"),
        **dict.fromkeys(("avg_pool1d", "avg_pool2d", "avg_pool3d"), "spmd.functions.avg_pool(x, window)"),
        **dict.fromkeys(
            ("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d"),
            'spmd.functions.resize(x, size=size, method="area")',
        ),
        **dict.fromkeys(
            ("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d"),
            "spmd.functions.adaptive_max_pool(x, output_size)",
        ),
        **dict.fromkeys(("interpolate", "upsample"), "spmd.functions.resize(x, size=size)"),
        **dict.fromkeys(("grid_sample", "map_coordinates"), "spmd.functions.sample(x, points)"),
        "softmax_cross_entropy_with_integer_labels": "spmd.functions.softmax_cross_entropy(x, labels)",
        "logsoftmax": "spmd.functions.log_softmax(x)",
        **dict.fromkeys(("hardswish", "hard_silu"), "spmd.functions.hard_swish(x)"),
        "hardsigmoid": "spmd.functions.hard_sigmoid(x)",
        "logsigmoid": "spmd.functions.log_sigmoid(x)",
        "prelu": "spmd.functions.leaky_relu(x, negative_slope), or np.where(x > 0, x, a * x) to differentiate a",
        "normalize": "x / np.linalg.norm(x, axis=-1, keepdims=True)",
        "standardize": "spmd.functions.layer_norm(x)",
        "dropout2d": "spmd.functions.dropout(x, rate, key, broadcast_dims=(2, 3))",
        **dict.fromkeys(
            ("scaled_dot_product_attention", "dot_product_attention"),
            "spmd.functions.attention(q, k, v)",
        ),
        **dict.fromkeys(("rotary_embedding", "apply_rotary_emb"), "spmd.functions.rope(x)"),
        "onehot": "spmd.functions.one_hot(ids, classes)",
        "lookup": "spmd.functions.embedding(table, ids)",
        "segment_sum": "spmd.functions.add_rows",
    },
    "spmd.random": {
        **dict.fromkeys(("PRNGKey", "seed", "manual_seed"), "spmd.random.key(seed)"),
        **dict.fromkeys(("rand", "random"), "spmd.random.uniform(key, shape)"),
        **dict.fromkeys(("randn", "standard_normal"), "spmd.random.normal(key, shape)"),
        "random_bits": "spmd.random.bits(key, shape)",
        **dict.fromkeys(("integers", "random_integers"), "spmd.random.randint(key, shape, minval, maxval)"),
        "randperm": "spmd.random.permutation(key, n)",
        "shuffle": "spmd.random.permutation(key, x)",
        "multinomial": "spmd.random.categorical(key, logits)",
        "RandomState": "spmd.random.default_rng(seed, axis_name)",
        "key_data": "spmd.random.key(seed) is its data",
        "clone": "spmd.random.split(key)",
    },
    "spmd.optim": {
        "SGD": "spmd.optim.sgd(learning_rate)",
        "Adam": "spmd.optim.adam(learning_rate)",
        "AdamW": "spmd.optim.adamw(learning_rate)",
        "momentum": "spmd.optim.sgd(learning_rate, momentum=0.9)",
        "nesterov": "spmd.optim.sgd(learning_rate, momentum=0.9, nesterov=True)",
        "apply_updates": "params, state = optimizer.update(grads, state, params): it gives the new parameters",
        "global_norm": "spmd.norm(grads)",
        "clip_grad_norm_": "spmd.optim.clip_by_global_norm(grads, max_norm)",
        **dict.fromkeys(("ZeroRedundancyOptimizer", "fully_shard"), "spmd.optim.shard(optimizer, axis_name)"),
        **dict.fromkeys(("GradScaler", "DynamicLossScale"), "spmd.optim.mixed_precision(optimizer)"),
        **dict.fromkeys(("AveragedModel", "swa_utils"), "spmd.optim.ema(optimizer, decay)"),
        **dict.fromkeys(("multi_transform", "masked", "param_groups"), "spmd.optim.groups({pattern: optimizer})"),
        "set_to_zero": "spmd.optim.frozen()",
        **dict.fromkeys(("MultiSteps", "apply_every"), "spmd.training.accumulate(loss, microbatches)"),
        **dict.fromkeys(("OneCycleLR", "cosine_onecycle_schedule"), "spmd.optim.one_cycle"),
        **dict.fromkeys(("StepLR", "exponential_step_schedule"), "spmd.optim.step_decay"),
        "warmup_constant_schedule": "spmd.optim.constant",
        **dict.fromkeys(("cosine_decay_schedule", "CosineAnnealingLR"), "spmd.optim.cosine"),
        **dict.fromkeys(("linear_schedule", "LinearLR"), "spmd.optim.linear"),
        "warmup_cosine_decay_schedule": "spmd.optim.cosine",
        "lr_scheduler": "spmd.optim.cosine, spmd.optim.linear, or a function of the number of updates done",
        "constant_schedule": "the number itself",
        "exponential_decay": "lambda steps: rate * decay**steps in place of the learning rate",
        "chain": "one around the other: spmd.optim.clipped(optimizer, 1.0)",
    },
    "spmd.data": {
        **dict.fromkeys(("DataLoader", "Dataset", "TensorDataset"), "spmd.data.Loader(arrays_or_function, sampler)"),
        **dict.fromkeys(("DistributedSampler", "RandomSampler", "BatchSampler"), "spmd.data.Sampler(data, batch_size)"),
    },
    "spmd.solvers": {
        **dict.fromkeys(("lsmr", "cgls", "lstsq"), "spmd.solvers.lsqr(A, b)"),
        "pcg": "spmd.solvers.cg(A, b, M=M)",
        "conjugate_gradient": "spmd.solvers.cg(A, b)",
        "aslinearoperator": "spmd.linear.from_scipy",
        **dict.fromkeys(
            ("gmres", "lgmres", "bicg", "bicgstab", "cgs", "qmr", "tfqmr", "minres", "spsolve", "splu"),
            "spmd.solvers.lsqr(A, b) for any matrix, spmd.solvers.cg(A, b) for a symmetric positive definite one",
        ),
    },
    "spmd.bridge.torch": {
        **dict.fromkeys(("DistributedDataParallel", "DDP"), "spt.data_parallel(model, axis_name)"),
        **dict.fromkeys(
            ("FullyShardedDataParallel", "FSDP", "FSDPModule", "fully_shard", "wrap", "auto_wrap"),
            "spt.shard_parameters(model, axis_name, unit=Block)",
        ),
        **dict.fromkeys(
            ("transformer_auto_wrap_policy", "size_based_auto_wrap_policy", "ModuleWrapPolicy"),
            "unit= of spt.shard_parameters: a class, or a function of a name and a module",
        ),
        **dict.fromkeys(
            ("MixedPrecision", "MixedPrecisionPolicy"), "param_dtype= and reduce_dtype= of spt.shard_parameters"
        ),
        **dict.fromkeys(
            ("ShardingStrategy", "BackwardPrefetch"), "reshard_after_forward= and prefetch= of spt.shard_parameters"
        ),
        **dict.fromkeys(
            ("set_requires_gradient_sync", "set_is_last_backward", "require_backward_grad_sync"),
            "with model.no_sync(): for all backwards before a step but the last",
        ),
        **dict.fromkeys(("full_tensor", "get_full_params"), "p.whole(), on all workers of its axes"),
        "to_local": "p.block()",
        **dict.fromkeys(
            ("summon_full_params", "get_model_state_dict", "full_state_dict", "state_dict_type", "StateDictType"),
            "spt.state_dict(model), of whole tensors",
        ),
        **dict.fromkeys(
            ("get_optimizer_state_dict", "optim_state_dict", "full_optim_state_dict"),
            "spmd.save(path, {'model': model, 'optimizer': optimizer}), which spmd.load reads on any mesh",
        ),
        **dict.fromkeys(
            ("GPipe", "Pipe", "PipelineStage", "ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B"),
            "spt.pipeline(stages, axis_name, schedule=...)",
        ),
        "ZeroRedundancyOptimizer": "spt.shard_optimizer(optimizer, axis_name)",
        "DataLoader": "spt.DistributedSampler(data, axis_name=axis_name).loader()",
        "clip_grad_norm": "spt.clip_grad_norm_(modules, max_norm)",
        "ShardedGradScaler": "spt.GradScaler",
        "no_sync": "no_sync() of what spt.data_parallel and spt.shard_parameters give",
        **{
            f"DistributedConv{d}d": f"spt.nn.Conv{d}d(in_channels, out_channels, kernel_size, spec=spec)"
            for d in (1, 2, 3)
        },
        "ColwiseParallel": "spt.nn.Linear(in_features, out_features, w_spec=P(axis_name))",
        "RowwiseParallel": "spt.nn.Linear(in_features, out_features, w_spec=P(None, axis_name))",
        "ColumnParallel": "spt.nn.Linear(in_features, out_features, w_spec=P(axis_name))",
        "RowParallel": "spt.nn.Linear(in_features, out_features, w_spec=P(None, axis_name))",
        "DistributedLinear": "spt.nn.Linear(in_features, out_features, spec=P_x, w_spec=P_w, out_spec=P_y)",
        **{name: f"spt.nn.{name}" for name in ("Repartition", "SumReduce", "AllSumReduce", "HaloExchange")},
        "grad": "torch.func.grad(f)",
        "value_and_grad": "torch.func.grad_and_value(f)",
        "stop_gradient": "x.detach()",
        "checkpoint": "torch.utils.checkpoint.checkpoint(f, x, use_reentrant=False)",
        "random": "torch's own draws within spt.drawing()",
        "numpy": "torch's functions",
    },
}
"""For each public module, names of other libraries that it lacks, and what to write instead."""
INSTEAD["spmd.numpy"] = {
    "bfloat16": "ml_dtypes.bfloat16",
    "tensor": "spmd.numpy.array(...)",
    "cat": "spmd.numpy.concatenate(...)",
    "unsqueeze": "spmd.numpy.expand_dims(x, axis)",
    "from_numpy": "spmd.numpy.asarray(x)",
    "vmap": "write f for arrays of one dimension more, as NumPy broadcasts",
    "grad": "spmd.grad(f)",
}

_OF_NUMPY = {"spmd", "spmd.functions"}


def closest(value: object, candidates: Iterable[str], default: str | None = None) -> str:
    """The candidate with another library's spelling, or with similar letters; otherwise `default` or the first."""
    candidates = list(candidates)
    text = str(value).lower()
    synonyms = [name for name in candidates if text in VALUES.get(name, "").split()]
    return (synonyms or nearest(text, candidates, 1) or [default or candidates[0]])[0]


def keyword(f: Callable, name: str) -> tuple[str, str]:
    """What a function accepts, and the remedy, for a keyword that it does not have."""
    variable = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    own = [p.name for p in inspect.signature(f).parameters.values() if p.kind not in variable and p.name != "self"]
    lines = [line.split() for line in KEYWORDS]
    meant = [line[0] for line in lines if name in line[1:] and line[0] in own]
    close = meant or nearest(name, own, 1)
    mend = f"write {close[0]}=" if close else "leave it out"
    return ", ".join(own) or "no arguments", mend if meant else UNKNOWN_KEYWORDS.get(name, mend)


def public_name(f: Callable) -> str:
    """The name of a function as users write it: `spmd.functions.relu`."""
    for module in (
        *("spmd", "spmd.data", "spmd.functions", "spmd.linear", "spmd.optim", "spmd.random", "spmd.training"),
        "spmd.bridge.torch",
    ):
        public = vars(sys.modules.get(module, sys)).get(f.__name__)
        if public is not None and f in (public, getattr(public, "__wrapped__", None)):
            return f"{module}.{f.__name__}"
    return f"{f.__module__}.{f.__qualname__}"


def instead(module: str, name: str) -> str:
    """What to write for a name that a module lacks; empty if nothing is known."""
    mend = INSTEAD.get(module, {}).get(name)
    if mend is not None:
        return mend
    if module == "spmd.random" and hasattr(np.random.Generator, name):
        return f"spmd.random.default_rng(seed, axis_name).{name}(...)"
    if module in ("spmd.bridge.torch", "spmd.bridge.torch.functions"):
        return _of_torch(name)
    if module in _OF_NUMPY and name in np.__all__:
        return f"np.{name}: bodies are plain NumPy; spmd.numpy.{name} takes lists of traced arrays too"
    return ""


def _of_torch(name: str) -> str:
    import torch

    general = INSTEAD["spmd"].get(name, "")
    if hasattr(torch.func, name):
        return f"torch.func.{name}"
    if general.startswith(("spmd.psum", "spmd.p", "spmd.all_", "spmd.s", "spmd.br", "spmd.ra", "spmd.w", "spmd.axis")):
        return general.replace("spmd.", "spt.")
    if hasattr(torch.nn.functional, name):
        return f"torch.nn.functional.{name}"
    return f"torch.{name}" if hasattr(torch, name) else general
