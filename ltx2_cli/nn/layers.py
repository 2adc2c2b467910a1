"""Layers that the networks share: linear, norms, feed-forward, modulation by the noise level, and convolutions of
channels-last arrays [batch, *axes, channels], also of images split over devices."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Float

from ltx2_cli.parallel.constrain import active, device, keep_row_major
from ltx2_cli.parallel.devices import computes_in_float32
from ltx2_cli.parallel.mesh import LANES, ShardingPlan
from ltx2_cli.parallel.pairs import Exchanged, combine, exchange
from ltx2_cli.units import FLOAT32_BYTES
from ltx2_cli.weights.declare import CONV, VIDEO_CONV, Axes, Scope, Shape, Weight
from ltx2_cli.weights.quantized_matrix import Matrix, QuantizedMatrix, quantize, rotate_groups

SINUSOID_WIDTH = 256
GELU_LEAST = 0.1701  # the magnitude of its least value, rounded up
Padding = tuple[tuple[int, int], ...]  # elements added before and after each axis
FrameNumber = int | jax.Array
IMAGE_AXES = ("height", "width")  # mesh axes that split images, inside `jax.shard_map`


class BoundedActivation(NamedTuple):
    """A function of the input of a product, and an upper bound of its magnitude in each row, float32 [...], from that
    input [..., channels]."""

    function: Callable[[jax.Array], jax.Array]
    bound: Callable[[jax.Array], jax.Array]


class Linear(nnx.Module):
    """y = x·Wᵀ + b over the last axis. `axes` are the logical axes of (input, output). W is (out, in), as on disk:
    loading moves no element, and XLA's products are as fast with either order."""

    def __init__(self, scope: Scope, d_in: int, d_out: int, axes: Axes, bias: bool = True):
        self.kernel = scope.matrix("weight", (d_out, d_in), axes[::-1])
        self.bias = scope.weight("bias", (d_out,), axes[1:]) if bias else None
        self.axes = axes

    @property
    def rounds_input(self) -> bool:
        """Whether its products are in eight bits."""
        return _rounds(self.kernel.get_value())

    def prepare(self, x: Float[jax.Array, "*batch d_in"], bound: Callable[[], jax.Array] | None = None) -> Matrix:
        """x in HBM as the product reads it, also that of other layers with this one's type of matrix. `bound`: the
        function that makes an upper bound of |x| in each row, float32 [*batch], if x is rounded."""
        return materialize(x if self._split_input() else _rounded(x, self.kernel.get_value(), bound))

    def __call__(self, x: Float[jax.Array, "*batch d_in"] | QuantizedMatrix) -> Float[jax.Array, "*batch d_out"]:
        return self.finish(self.start(x))

    def start(
        self, x: Float[jax.Array, "*batch d_in"] | QuantizedMatrix, activation: BoundedActivation | None = None
    ) -> jax.Array | Exchanged:
        """The product of x, or of an activation of x, without the bias. If a pair of devices holds the inputs, it is in
        two parts, one of them on its way."""
        kernel, plan = self.kernel.get_value(), active()
        if isinstance(x, QuantizedMatrix):
            return multiply(x, kernel)
        if plan and (axis := self._split_input()):
            return _multiply_parts(x, kernel, plan, axis, activation)
        if activation:
            return multiply(self.prepare(activation.function(x), lambda: activation.bound(x)), kernel)
        return multiply(_rounded(x, kernel), kernel)

    def finish(self, product: jax.Array | Exchanged) -> Float[jax.Array, "*batch d_out"]:
        """The result of a product that `start` has made."""
        plan = active()
        if isinstance(product, Exchanged):
            assert plan
            product = combine(lambda own, other, _: own + other, plan, product)
        return product if self.bias is None else product + self.bias[...]

    def _split_input(self) -> str | None:
        """The mesh axis along which devices hold parts of the input, if these are a pair, or round their own."""
        plan, kernel = active(), self.kernel.get_value()
        axis: str | None = plan.weight(self.axes).spec[0] if plan else None
        if plan is None or axis is None or plan.mesh.shape[axis] == 1:
            return None
        if not isinstance(kernel, QuantizedMatrix):
            return plan.pair(self.axes[0])
        whole_groups = kernel.shape[-1] // plan.mesh.shape[axis] % (kernel.group_size or 1) == 0
        return axis if whole_groups and (kernel.rounds_input or plan.pair(self.axes[0])) else None


def multiply(x: Matrix, matrix: Matrix) -> Float[jax.Array, "*batch d_out"]:
    """x·Wᵀ over the last axis, in the dtype that x had before it was rounded: of eight bits where both are
    quantised, else in that dtype. Scales are applied to the result. Of x and W, the wider one is rotated as the
    other is."""
    dtype = x.result_dtype if isinstance(x, QuantizedMatrix) else x.dtype
    if isinstance(matrix, QuantizedMatrix):
        if isinstance(x, QuantizedMatrix):
            total = jnp.int32 if jnp.issubdtype(x.dtype, jnp.integer) else jnp.float32
            y = _product(x.values, matrix.numbers, total)
            return (y * x.scale[..., None] * matrix.scale).astype(dtype)
        y = _product(_rotated(x, matrix.group_size), matrix.numbers.astype(dtype))
        return (y * matrix.scale).astype(dtype)
    if isinstance(x, QuantizedMatrix):
        y = _product(x.values.astype(dtype), rotate_groups(matrix, x.group_size))
        return (y * x.scale[..., None]).astype(dtype)
    return _product(x, matrix)


def _rounds(matrix: Matrix) -> TypeGuard[QuantizedMatrix]:
    return isinstance(matrix, QuantizedMatrix) and matrix.rounds_input


def _rounded(x: jax.Array, matrix: Matrix, bound: Callable[[], jax.Array] | None = None) -> Matrix:
    """x in eight bits if its product with a matrix is of these, each token with a scale of its own."""
    if not _rounds(matrix):
        return x
    # A bound says nothing of rotated rows.
    bound = None if matrix.group_size else bound
    kind = matrix.type.of_inputs
    rounded = quantize(_rotated(x, kind.group_size), kind._replace(group_size=0), bound() if bound else None)
    return replace(rounded, group_size=kind.group_size, result_dtype=x.dtype)


def _rotated(x: jax.Array, group_size: int) -> jax.Array:
    """x with each group of its channels rotated; on a TPU where it lies, if groups fill its lanes: libtpu 0.0.42 copies
    x where its channels are split in groups, which takes longer than the rotation. A step of LTX-2.3 in int4 on a v5e
    takes 4.64 G cycles so, and 5.36 in groups."""
    if not group_size or group_size % LANES or device().platform != "tpu":
        return rotate_groups(x, group_size)
    first = range(0, x.shape[-1], group_size)
    rotated = jnp.concatenate([rotate_groups(x[..., i : i + group_size], group_size) for i in first], axis=-1)
    plan = active()
    return rotated if plan and plan.mesh.size > 1 else keep_row_major(rotated)


def _product(x: jax.Array, matrix: jax.Array, total: DTypeLike | None = None) -> jax.Array:
    """x·Wᵀ over the last axis, summed in `total` or as x's dtype has it."""
    # Not x @ w.mT: with a single row, XLA for CPUs would first write wᵀ.
    last = (((x.ndim - 1,), (1,)), ((), ()))
    return jax.lax.dot_general(x, matrix, last, precision=precision(x.dtype), preferred_element_type=total)


def _multiply_parts(
    x: jax.Array, matrix: Matrix, plan: ShardingPlan, axis: str, activation: BoundedActivation | None
) -> jax.Array | Exchanged:
    """The product of inputs, or of an activation of them, that lie along a mesh axis: each device rounds its part of a
    token by itself, if at all, and sums are sent in x's dtype."""

    def part(x: jax.Array, matrix: Matrix) -> jax.Array:
        if activation is None:
            return multiply(_rounded(x, matrix), matrix)
        if not _rounds(matrix):
            return multiply(materialize(activation.function(x)), matrix)
        activated, bound = materialize((activation.function(x), activation.bound(x)))
        return multiply(materialize(_rounded(activated, matrix, lambda: bound)), matrix)

    values = PartitionSpec(None, axis)
    of_matrix = replace(matrix, values=values, scale=PartitionSpec()) if isinstance(matrix, QuantizedMatrix) else values
    specs = PartitionSpec(*[None] * (x.ndim - 1), axis), of_matrix
    if plan.is_pair(axis):
        return exchange(part, plan, axis, specs, x, matrix)

    def stacked(x: jax.Array, matrix: Matrix) -> jax.Array:
        return part(x, matrix)[None]

    along = jax.shard_map(stacked, mesh=plan.mesh, in_specs=specs, out_specs=PartitionSpec(axis), axis_names={axis})
    return jax.lax.reduce(along(x, matrix), np.zeros((), x.dtype), jax.lax.add, (0,))


def precision(dtype: jnp.dtype) -> jax.lax.Precision | None:
    """The precision of products of arrays of `dtype`: full for float32, which TPUs by default round to bfloat16, and
    GPUs to TF32."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None


def rms_norm(
    x: Float[jax.Array, "*batch dim"], eps: float, weight: Float[jax.Array, " dim"] | None = None
) -> Float[jax.Array, "*batch dim"]:
    """x / sqrt(mean(x²) + eps) over the last axis; statistics in float32, the result in x's dtype."""
    normed = x.astype(jnp.float32) * rms_scale(x, eps)
    return (normed if weight is None else normed * weight).astype(x.dtype)


def rms_scale(x: Float[jax.Array, "*batch dim"], eps: float) -> Float[jax.Array, "*batch 1"]:
    """1 / sqrt(mean(x²) + eps) over the last axis, float32 [..., 1]."""
    return jax.lax.rsqrt(jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True) + eps)


def layer_norm(x: Float[jax.Array, "*batch dim"], eps: float) -> Float[jax.Array, "*batch dim"]:
    """(x − mean) / sqrt(var + eps) over the last axis, no affine part; statistics in float32."""
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
    return (centred * jax.lax.rsqrt(variance + eps)).astype(x.dtype)


def _gelu(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x, approximate=True)


def _gelu_bound(x: jax.Array) -> jax.Array:
    """GELU grows with positive inputs, and is at least -0.1701. XLA finds the largest input as it makes them."""
    return jnp.maximum(_gelu(jnp.max(x, axis=-1).astype(jnp.float32)), GELU_LEAST)


GELU = BoundedActivation(_gelu, _gelu_bound)


class FeedForward(nnx.Module):
    """Linear to four times the width, tanh-approximated GELU, linear back."""

    def __init__(self, scope: Scope, dim: int, bias: bool = True):
        self.up = Linear(scope / "net" / 0 / "proj", dim, 4 * dim, ("embed", "mlp"), bias)
        self.down = Linear(scope / "net" / 2, 4 * dim, dim, ("mlp", "embed"), bias)

    def __call__(self, x: Matrix) -> jax.Array:
        return self.finish(self.start(x))

    def start(self, x: Matrix) -> jax.Array | Exchanged:
        """The product of the second layer, as `Linear.start`."""
        return self.down.start(self.up(x), GELU)

    def finish(self, product: jax.Array | Exchanged) -> jax.Array:
        """The result of a product that `start` has made."""
        return self.down.finish(product)


def materialize(x: Any) -> Any:
    """Write x to HBM before a product reads it, on a TPU; otherwise XLA fuses and recomputes it for each tile."""
    # By the compiler's schedule LTX-2.3's feed-forward takes 1.98 M cycles with this and 2.33 without on v6e:2x4, 1.96
    # and 2.54 on tpu7x:2x2x1.
    return jax.lax.optimization_barrier(x) if device().platform == "tpu" else x


def sinusoid(timesteps: jax.Array) -> jax.Array:
    """[cos, sin] of timesteps [...] at 128 frequencies from 1 down to nearly 1e-4, float32 [..., 256]. Exponents of the
    frequencies are float32, as in training: timesteps reach 1000, and the rounding shows in their angles."""
    half = SINUSOID_WIDTH // 2
    exponents = np.float32(-np.log(10_000.0)) * np.arange(half, dtype=np.float32) / np.float32(half)
    frequencies = np.exp(exponents.astype(np.float64)).astype(np.float32)
    angles = timesteps.astype(jnp.float32)[..., None] * frequencies
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)


class AdaLayerNormSingle(nnx.Module):
    """Modulation rows from a timestep, after PixArt-α (arXiv:2310.00426)."""

    def __init__(self, scope: Scope, dim: int, rows: int):
        embedder = scope / "emb" / "timestep_embedder"
        self.linear_1 = Linear(embedder / "linear_1", SINUSOID_WIDTH, dim, (None, "embed"))
        self.linear_2 = Linear(embedder / "linear_2", dim, dim, (None, "embed"))
        self.linear = Linear(scope / "linear", dim, rows * dim, (None, "embed"))
        self.rows = rows

    def __call__(self, timesteps: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The modulation [..., rows, dim], and its embedding [..., dim], in the weights' dtype."""
        dtype = self.linear_1.kernel.dtype
        embedded = self.linear_2(jax.nn.silu(self.linear_1(sinusoid(timesteps).astype(dtype))))
        rows = jnp.split(self.linear(jax.nn.silu(embedded)), self.rows, axis=-1)
        return jnp.stack(rows, axis=-2), embedded


def convolve(x: jax.Array, kernel: jax.Array, padding: Padding, stride: int = 1, dilation: int = 1) -> jax.Array:
    """x [batch, *axes, in], zero-padded, convolved with kernel [*window, in, out]. `stride` and `dilation` are those of
    every axis."""
    rank = len(padding)
    axes = "DHW"[-rank:]
    layout, exact = (f"N{axes}C", f"{axes}IO", f"N{axes}C"), precision(x.dtype)
    steps = (stride,) * rank, padding, None, (dilation,) * rank
    return jax.lax.conv_general_dilated(x, kernel, *steps, dimension_numbers=layout, precision=exact)


def convolved_itemsize(kernel: Weight, device: jax.Device) -> int:
    """Bytes of a value in a convolution's result, which may be float32."""
    return FLOAT32_BYTES if computes_in_float32(device) else kernel.dtype.itemsize


def convolve_by_taps(
    x: jax.Array, kernel: jax.Array, padding: Padding, stride: int = 1, dilation: int = 1
) -> jax.Array:
    """`convolve`; on a TPU a loop with a product for each tap of the window, summed in float32."""
    # libtpu unrolls a convolution of many channels into megabytes of code: each of the audio decoders compiled for
    # half a minute on v6e, for minutes on tpu7x. A barrier around the operands makes products of one shape one kernel,
    # for any window and dilation.
    if stride > 1 or device().platform != "tpu":
        return convolve(x, kernel, padding, stride, dilation)
    *window, d_in, d_out = kernel.shape
    x, taps = jnp.pad(x, ((0, 0), *padding, (0, 0))), kernel.reshape(-1, d_in, d_out)
    sizes = [size - dilation * (width - 1) for size, width in zip(x.shape[1:-1], window, strict=True)]

    def add_tap(tap: jax.Array, y: jax.Array) -> jax.Array:
        position: Sequence[jax.Array] = jnp.unravel_index(tap, window)
        part = jax.lax.dynamic_slice(x, (0, *(dilation * at for at in position), 0), (len(x), *sizes, d_in))
        operands = jax.lax.optimization_barrier((part, taps[tap]))
        return y + jnp.matmul(*operands, precision=precision(x.dtype), preferred_element_type=jnp.float32)

    y = jnp.zeros_like(x, jnp.float32, shape=(len(x), *sizes, d_out))
    return jax.lax.fori_loop(0, len(taps), add_tap, y).astype(x.dtype)


class Conv(nnx.Module):
    """A convolution along the axes of its kernel's window; the kernel has `shape` (*window, in, out). Zeros pad."""

    def __init__(
        self, scope: Scope, shape: Shape, padding: Padding, stride: int = 1, dilation: int = 1, bias: bool = True
    ):
        self.kernel = scope.weight("weight", shape, (*(None,) * (len(shape) - 2), "conv_in", "conv_out"), CONV)
        self.bias = scope.weight("bias", shape[-1:], ("conv_out",)) if bias else None
        self.padding, self.stride, self.dilation = padding, stride, dilation

    def __call__(self, x: jax.Array) -> jax.Array:
        y = convolve_by_taps(x, self.kernel[...], self.padding, self.stride, self.dilation)
        return y if self.bias is None else y + self.bias[...]


class Conv3D(nnx.Module):
    """A 3×3×3 convolution with bias that keeps the size of a video [batch, frames, height, width, channels].

    `time_padding` counts frames added before and after: copies of the first and the last (`time_mode` "edge"), or zeros
    ("constant"). `halo_pad` pads each frame. The work is one convolution in two dimensions, with the frames merged into
    the batch: XLA makes that faster than one in three dimensions, and with half the temporaries.
    """

    def __init__(
        self,
        scope: Scope,
        d_in: int,
        d_out: int,
        time_padding: tuple[int, int],
        time_mode: str = "edge",
        reflect: bool = False,
    ):
        self.kernel = scope.weight("weight", (3, 3, 3, d_in, d_out), (*(None,) * 3, "conv_in", "conv_out"), VIDEO_CONV)
        self.bias = scope.weight("bias", (d_out,), ("conv_out",))
        self.time_padding, self.time_mode, self.reflect = time_padding, time_mode, reflect

    def __call__(self, x: jax.Array) -> jax.Array:
        x, spatial_padding = halo_pad(x, self.reflect)
        x = jnp.pad(x, ((0, 0), self.time_padding, (0, 0), (0, 0), (0, 0)), mode=self.time_mode)
        return self._windows(x, spatial_padding)

    def resume(self, x: jax.Array, start: FrameNumber, frames: int | None) -> jax.Array:
        """The output for all windows of three frames in x, a part of a video from its frame `start` on. Windows that
        reach beyond the first or the last of its `frames` see that one again; None: no window does."""
        x = x if frames is None else _repeat_ends(x, start, frames, self.time_padding)
        return self._windows(*halo_pad(x, self.reflect))

    def _windows(self, x: jax.Array, spatial_padding: Padding) -> jax.Array:
        """One frame for each window of three; frames are zero-padded by `spatial_padding`."""
        kernel, kept = self.kernel[...], x.shape[1] - sum(self.time_padding)
        height, width, frames, d_in, d_out = kernel.shape
        joined = jnp.concatenate([x[:, frame : frame + kept] for frame in range(frames)], axis=-1)
        images = joined.reshape(-1, *joined.shape[2:])
        y = convolve(images, kernel.reshape(height, width, frames * d_in, d_out), spatial_padding)
        return y.reshape(x.shape[0], kept, *y.shape[1:]) + self.bias[...]


def _repeat_ends(x: jax.Array, start: FrameNumber, frames: int, padding: tuple[int, int]) -> jax.Array:
    """x [batch, frames, height, width, channels], from frame `start` of a video on, with copies of the video's first
    frame in so many before it, and of its last of `frames` in so many behind it, where x has these places."""
    before, after = padding
    for place, end in [(-1 - n, 0) for n in range(before)] + [(frames + n, frames - 1) for n in range(after)]:
        index = jnp.clip(place - start, 0, x.shape[1] - 1)
        copied = jax.lax.dynamic_slice_in_dim(x, jnp.where(index == place - start, end - start, index), 1, axis=1)
        x = jax.lax.dynamic_update_slice_in_dim(x, copied, index, axis=1)
    return x


def halo_pad(x: jax.Array, reflect: bool) -> tuple[jax.Array, Padding]:
    """Pad x [..., height, width, channels] by one pixel on each side, and return the zero padding that is left to the
    convolution. An axis that is split over devices gets the neighbours' edges. Around the whole image are zeros or, if
    `reflect`, a reflection."""
    sizes = jax.sharding.get_abstract_mesh().shape
    split = [sizes.get(axis, 1) > 1 for axis in IMAGE_AXES]
    left = tuple((0, 0) if is_split or reflect else (1, 1) for is_split in split)
    if reflect and not all(split):
        reflected = tuple((0, 0) if is_split else (1, 1) for is_split in split)
        x = jnp.pad(x, ((0, 0),) * (x.ndim - 3) + reflected + ((0, 0),), mode="reflect")
    for axis, is_split in zip(IMAGE_AXES, split, strict=True):
        if is_split:
            x = _exchange_edges(x, axis, sizes[axis], reflect)
    return x, left


def _exchange_edges(x: jax.Array, mesh_axis: str, parts: int, reflect: bool) -> jax.Array:
    axis, last = x.ndim - 3 + IMAGE_AXES.index(mesh_axis), parts - 1

    def edge(index: int) -> jax.Array:
        index %= x.shape[axis]
        return jax.lax.slice_in_dim(x, index, index + 1, axis=axis)

    # zeros where no neighbour sends
    before = jax.lax.ppermute(edge(-1), mesh_axis, [(part, part + 1) for part in range(last)])
    behind = jax.lax.ppermute(edge(0), mesh_axis, [(part + 1, part) for part in range(last)])
    if reflect:
        part = jax.lax.axis_index(mesh_axis)
        before = jnp.where(part == 0, edge(1), before)
        behind = jnp.where(part == last, edge(-2), behind)
    return jnp.concatenate([before, x, behind], axis=axis)
