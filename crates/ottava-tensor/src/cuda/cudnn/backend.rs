//! cuDNN's backend API. Descriptors with numbered attributes form a graph, which is planned and executed.

mod numbers;
mod plan;

pub(super) use numbers::{ADD, BF16, DIV, EXP, F16, F32, I32, I64, IDENTITY, LOG, MAX, MUL, SUB, SUM};
pub(super) use plan::{DeviceDescription, On, Plan, Session};

use super::super::driver::Handle;
use super::super::load::{CUDNN, LibraryReport, Problem, SearchPath, SharedLibrary, dotted, functions};
use crate::error::{Error, Result};
use numbers::{AND, As, BOOL, GREATER, GREATER_OR_EQUAL, INDEX, LESS, SELECT, TANH, TANH_GRADIENT, attribute, kind};
use std::ffi::{CStr, c_char, c_void};
use std::ptr::null_mut;
use std::sync::OnceLock;

functions! {
    /// The functions of the backend API.
    pub(super) struct Api {
        version = cudnnGetVersion() -> usize;
        error_string = cudnnGetErrorString(i32) -> *const c_char;
        last_error = cudnnGetLastErrorString(*mut c_char, usize) -> ();
        create_handle = cudnnCreate(*mut Handle) -> i32;
        destroy_handle = cudnnDestroy(Handle) -> i32;
        set_stream = cudnnSetStream(Handle, Handle) -> i32;
        create = cudnnBackendCreateDescriptor(i32, *mut Handle) -> i32;
        destroy = cudnnBackendDestroyDescriptor(Handle) -> i32;
        finalize = cudnnBackendFinalize(Handle) -> i32;
        set = cudnnBackendSetAttribute(Handle, i32, i32, i64, *const c_void) -> i32;
        get = cudnnBackendGetAttribute(Handle, i32, i32, i64, *mut i64, *mut c_void) -> i32;
        execute = cudnnBackendExecute(Handle, Handle, Handle) -> i32;
    }
}

fn opened() -> &'static Result<Api, Problem> {
    static OPENED: OnceLock<Result<Api, Problem>> = OnceLock::new();
    OPENED.get_or_init(|| {
        // cuDNN opens NVRTC and cuBLASLt by name. In a Python package, the linker finds these libraries only if they are already open.
        let _ = (super::super::nvrtc::require(), super::super::cublaslt::require());
        SharedLibrary::open(&CUDNN, SearchPath::of_process()).and_then(Api::load)
    })
}

pub(super) fn api() -> Result<&'static Api> {
    opened().as_ref().map_err(|problem| problem.clone().into())
}

pub(in crate::cuda) fn report() -> LibraryReport {
    // SAFETY: the function takes no pointers.
    LibraryReport::new(&CUDNN, opened(), |api| &api.library, |api| Some(dotted(unsafe { (api.version)() })))
}

impl Api {
    fn check(&self, status: i32, call: &str) -> Result<()> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: the library returns a constant string for each status.
        let text = unsafe { (self.error_string)(status) };
        let name = if text.is_null() {
            format!("status {status}")
        } else {
            // SAFETY: the pointer is not null, and the string is constant.
            unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
        };
        let mut detail = [0u8; 1024];
        // SAFETY: the library writes at most the given number of bytes and ends them with a zero.
        unsafe { (self.last_error)(detail.as_mut_ptr().cast(), detail.len()) };
        let detail = CStr::from_bytes_until_nul(&detail).map(|text| text.to_string_lossy()).unwrap_or_default();
        let message = if detail.is_empty() { name } else { format!("{name}: {detail}") };
        Err(Error::Cuda { library: CUDNN.name, call: call.to_string(), message })
    }
}

/// A descriptor of the backend API that is destroyed when this value is dropped.
struct Descriptor {
    api: &'static Api,
    raw: Handle,
}

impl Descriptor {
    fn new(api: &'static Api, kind: i32) -> Result<Descriptor> {
        let mut raw = null_mut();
        // SAFETY: the library writes one handle.
        api.check(unsafe { (api.create)(kind, &mut raw) }, "cudnnBackendCreateDescriptor")?;
        Ok(Descriptor { api, raw })
    }

    /// Sets an attribute to `values`. `T` must be the C type of `kind`.
    fn set<T: Copy>(self, attribute: i32, kind: As, values: &[T]) -> Result<Descriptor> {
        // SAFETY: the library copies `values.len()` values.
        let status =
            unsafe { (self.api.set)(self.raw, attribute, kind as i32, values.len() as i64, values.as_ptr().cast()) };
        self.api.check(status, &format!("cudnnBackendSetAttribute {attribute}"))?;
        Ok(self)
    }

    fn finish(self, what: &str) -> Result<Descriptor> {
        // SAFETY: the descriptor lives.
        self.api.check(unsafe { (self.api.finalize)(self.raw) }, &format!("cudnnBackendFinalize of {what}"))?;
        Ok(self)
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: `new` created the descriptor, and nothing uses it afterwards.
        unsafe { (self.api.destroy)(self.raw) };
    }
}

/// The sizes or strides of the four dimensions of a tensor: batch, head, row, column.
pub(super) type Dims = [i64; 4];

pub(super) fn row_major(dims: Dims) -> Dims {
    [dims[1] * dims[2] * dims[3], dims[2] * dims[3], dims[3], 1]
}

/// Exchanges the last two dimensions of sizes or strides.
pub(super) fn transposed([a, b, c, d]: Dims) -> Dims {
    [a, b, d, c]
}

/// The tensors of a graph that have memory. The number of a slot is the id of its pointer.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Slot {
    Q = 1,
    K,
    V,
    O,
    Lse,
    DO,
    DQ,
    DK,
    DV,
    RowSum,
    DQSum,
    // The gradients of keys and values of each query head.
    DKHeads,
    DVHeads,
    // The lengths and offsets of packed documents.
    Lengths,
    FusedOffsets,
    OutputOffsets,
    RowOffsets,
    // The host scalars, which are read when the graph is enqueued.
    Scale,
    NegativeInfinity,
    One,
    Window,
    SoftCap,
}

impl Slot {
    fn is_on_host(self) -> bool {
        self as i64 >= Slot::Scale as i64
    }
}

/// The first id of intermediates.
const FIRST_VIRTUAL: i64 = 100;

/// A tensor of a graph under construction.
#[derive(Clone, Copy)]
pub(super) struct Node {
    index: usize,
    dims: Dims,
}

/// The dimensions of a product that are numbers of tokens.
#[derive(Clone, Copy)]
pub(super) enum Tokens {
    /// Rows and columns, as in the scores of queries and keys.
    RowsAndColumns,
    /// Rows and the contracted dimension, as in sums over tokens.
    RowsAndContracted,
}

/// A graph under construction. Its methods add tensors and operations.
pub(super) struct Graph {
    api: &'static Api,
    tensors: Vec<Descriptor>,
    operations: Vec<Descriptor>,
    /// The descriptors that the operations refer to.
    parts: Vec<Descriptor>,
}

impl Graph {
    pub(super) fn new(api: &'static Api) -> Graph {
        Graph { api, tensors: Vec::new(), operations: Vec::new(), parts: Vec::new() }
    }

    fn tensor(
        &mut self,
        dtype: i32,
        dims: Dims,
        strides: Dims,
        slot: Option<Slot>,
        offsets: Option<Node>,
    ) -> Result<Node> {
        let index = self.tensors.len();
        let id = slot.map_or(FIRST_VIRTUAL + index as i64, |slot| slot as i64);
        let by_value = slot.is_some_and(Slot::is_on_host);
        let mut tensor = Descriptor::new(self.api, kind::TENSOR)?
            .set(attribute::TENSOR_TYPE, As::DataType, &[dtype])?
            .set(attribute::TENSOR_DIMS, As::I64, &dims)?
            .set(attribute::TENSOR_STRIDES, As::I64, &strides)?
            .set(attribute::TENSOR_ID, As::I64, &[id])?
            .set(attribute::TENSOR_ALIGNMENT, As::I64, &[16i64])?
            .set(attribute::TENSOR_VIRTUAL, As::Bool, &[u8::from(slot.is_none())])?
            .set(attribute::TENSOR_BY_VALUE, As::Bool, &[u8::from(by_value)])?;
        if let Some(offsets) = offsets {
            tensor = tensor.set(attribute::TENSOR_RAGGED_OFFSET, As::Descriptor, &[self.raw(offsets)])?;
        }
        self.tensors.push(tensor.finish("a tensor")?);
        Ok(Node { index, dims })
    }

    pub(super) fn input(&mut self, slot: Slot, dtype: i32, dims: Dims, strides: Dims) -> Result<Node> {
        self.tensor(dtype, dims, strides, Some(slot), None)
    }

    /// Adds a tensor like [`Graph::input`]. With `offsets`, document `d` of the batch starts `offsets[d]` elements after the first document.
    pub(super) fn packed_input(
        &mut self,
        slot: Slot,
        dtype: i32,
        dims: Dims,
        strides: Dims,
        offsets: Option<Node>,
    ) -> Result<Node> {
        self.tensor(dtype, dims, strides, Some(slot), offsets)
    }

    pub(super) fn scalar(&mut self, slot: Slot) -> Result<Node> {
        self.tensor(F32, [1; 4], [1; 4], Some(slot), None)
    }

    pub(super) fn intermediate(&mut self, dtype: i32, dims: Dims) -> Result<Node> {
        self.tensor(dtype, dims, row_major(dims), None, None)
    }

    fn raw(&self, node: Node) -> Handle {
        self.tensors[node.index].raw
    }

    /// Adds `y = mode(x, b)`, or `y = t ? x : b` for a selection. Only [`INDEX`] takes an `axis`.
    #[allow(clippy::too_many_arguments, reason = "the operands of one operation of the library")]
    pub(super) fn pointwise_into(
        &mut self,
        mode: i32,
        precision: i32,
        axis: Option<i64>,
        x: Node,
        b: Option<Node>,
        t: Option<Node>,
        y: Node,
    ) -> Result<()> {
        let mut part = Descriptor::new(self.api, kind::POINTWISE)?
            .set(attribute::POINTWISE_MODE, As::PointwiseMode, &[mode])?
            .set(attribute::POINTWISE_PRECISION, As::DataType, &[precision])?;
        if let Some(axis) = axis {
            part = part.set(attribute::POINTWISE_AXIS, As::I64, &[axis])?;
        }
        let part = part.finish("a pointwise mode")?;
        let mut operation = Descriptor::new(self.api, kind::POINTWISE_OPERATION)?
            .set(attribute::POINTWISE_OPERATION, As::Descriptor, &[part.raw])?
            .set(attribute::POINTWISE_X, As::Descriptor, &[self.raw(x)])?;
        for (place, node) in [(attribute::POINTWISE_B, b), (attribute::POINTWISE_T, t)] {
            if let Some(node) = node {
                operation = operation.set(place, As::Descriptor, &[self.raw(node)])?;
            }
        }
        let operation = operation.set(attribute::POINTWISE_Y, As::Descriptor, &[self.raw(y)])?;
        self.parts.push(part);
        self.operations.push(operation.finish("a pointwise operation")?);
        Ok(())
    }

    /// Adds `mode(x, b)` in F32 with the shape of `x`.
    pub(super) fn pointwise(&mut self, mode: i32, x: Node, b: Option<Node>) -> Result<Node> {
        let y = self.intermediate(F32, x.dims)?;
        self.pointwise_into(mode, F32, None, x, b, None, y)?;
        Ok(y)
    }

    /// Adds `c = a · b`. With `lengths`, the length of each document replaces the sizes of the `tokens` dimensions.
    pub(super) fn matmul_into(
        &mut self,
        a: Node,
        b: Node,
        c: Node,
        tokens: Tokens,
        lengths: Option<Node>,
    ) -> Result<()> {
        let part = Descriptor::new(self.api, kind::MATMUL)?
            .set(attribute::MATMUL_PRECISION, As::DataType, &[F32])?
            .finish("a product's type")?;
        let mut operation = Descriptor::new(self.api, kind::MATMUL_OPERATION)?
            .set(attribute::MATMUL_A, As::Descriptor, &[self.raw(a)])?
            .set(attribute::MATMUL_B, As::Descriptor, &[self.raw(b)])?
            .set(attribute::MATMUL_C, As::Descriptor, &[self.raw(c)])?
            .set(attribute::MATMUL_OPERATION, As::Descriptor, &[part.raw])?;
        if let Some(lengths) = lengths {
            let second = match tokens {
                Tokens::RowsAndColumns => attribute::MATMUL_COLUMNS,
                Tokens::RowsAndContracted => attribute::MATMUL_CONTRACTED,
            };
            for place in [attribute::MATMUL_ROWS, second] {
                operation = operation.set(place, As::Descriptor, &[self.raw(lengths)])?;
            }
        }
        self.parts.push(part);
        self.operations.push(operation.finish("a product")?);
        Ok(())
    }

    pub(super) fn reduce_into(&mut self, operator: i32, x: Node, y: Node) -> Result<()> {
        let part = Descriptor::new(self.api, kind::REDUCTION)?
            .set(attribute::REDUCTION_OPERATOR, As::ReductionOperator, &[operator])?
            .set(attribute::REDUCTION_PRECISION, As::DataType, &[F32])?
            .finish("a reduction's operator")?;
        let operation = Descriptor::new(self.api, kind::REDUCTION_OPERATION)?
            .set(attribute::REDUCTION_X, As::Descriptor, &[self.raw(x)])?
            .set(attribute::REDUCTION_Y, As::Descriptor, &[self.raw(y)])?
            .set(attribute::REDUCTION_OPERATION, As::Descriptor, &[part.raw])?;
        self.parts.push(part);
        self.operations.push(operation.finish("a reduction")?);
        Ok(())
    }

    pub(super) fn reduce(&mut self, operator: i32, x: Node, dims: Dims) -> Result<Node> {
        let y = self.intermediate(F32, dims)?;
        self.reduce_into(operator, x, y)?;
        Ok(y)
    }

    /// Adds a view of `x` in `dtype` with the last two dimensions exchanged. `offsets` are the offsets of documents in `x`.
    pub(super) fn transpose(&mut self, dtype: i32, x: Node, strides: Dims, offsets: Option<Node>) -> Result<Node> {
        let y = self.tensor(dtype, transposed(x.dims), strides, None, offsets)?;
        let operation = Descriptor::new(self.api, kind::RESHAPE_OPERATION)?
            .set(attribute::RESHAPE_X, As::Descriptor, &[self.raw(x)])?
            .set(attribute::RESHAPE_Y, As::Descriptor, &[self.raw(y)])?;
        self.operations.push(operation.finish("a transposition")?);
        Ok(y)
    }

    /// Sets the scores of later keys to minus infinity. This is the causal mask.
    pub(super) fn causal(&mut self, scores: Node, negative_infinity: Node) -> Result<Node> {
        let [row, column] = self.indices(scores)?;
        let seen = self.intermediate(BOOL, scores.dims)?;
        self.pointwise_into(GREATER_OR_EQUAL, BOOL, None, row, Some(column), None, seen)?;
        self.where_seen(scores, seen, negative_infinity)
    }

    /// Sets the scores of keys before the window of their query to minus infinity. A query at `i` sees a key at `j` if `j + window > i`.
    pub(super) fn in_window(&mut self, scores: Node, window: Node, negative_infinity: Node) -> Result<Node> {
        let [row, column] = self.indices(scores)?;
        let end = self.intermediate(F32, scores.dims)?;
        self.pointwise_into(ADD, F32, Some(3), column, Some(window), None, end)?;
        let seen = self.intermediate(BOOL, scores.dims)?;
        self.pointwise_into(GREATER, BOOL, None, end, Some(row), None, seen)?;
        self.where_seen(scores, seen, negative_infinity)
    }

    /// Adds `cap · tanh(scores / cap)`, and returns it with `scores / cap`.
    pub(super) fn capped(&mut self, scores: Node, cap: Node) -> Result<(Node, Node)> {
        let ratio = self.pointwise(DIV, scores, Some(cap))?;
        let bounded = self.pointwise(TANH, ratio, None)?;
        Ok((self.pointwise(MUL, bounded, Some(cap))?, ratio))
    }

    /// Adds the gradient of the scores of [`Graph::capped`], computed from the gradient of the capped scores.
    pub(super) fn capped_gradient(&mut self, gradient: Node, ratio: Node, cap: Node) -> Result<Node> {
        let dy = self.pointwise(MUL, gradient, Some(cap))?;
        let dx = self.intermediate(F32, dy.dims)?;
        let part = Descriptor::new(self.api, kind::POINTWISE)?
            .set(attribute::POINTWISE_MODE, As::PointwiseMode, &[TANH_GRADIENT])?
            .set(attribute::POINTWISE_PRECISION, As::DataType, &[F32])?
            .finish("a pointwise mode")?;
        let operation = Descriptor::new(self.api, kind::POINTWISE_OPERATION)?
            .set(attribute::POINTWISE_OPERATION, As::Descriptor, &[part.raw])?
            .set(attribute::POINTWISE_X, As::Descriptor, &[self.raw(ratio)])?
            .set(attribute::POINTWISE_DY, As::Descriptor, &[self.raw(dy)])?
            .set(attribute::POINTWISE_DX, As::Descriptor, &[self.raw(dx)])?;
        self.parts.push(part);
        self.operations.push(operation.finish("a pointwise gradient")?);
        self.pointwise(DIV, dx, Some(cap))
    }

    /// Sets scores beyond the length of their document to minus infinity. Without `lengths`, the scores do not change.
    pub(super) fn within(&mut self, scores: Node, lengths: Option<Node>, negative_infinity: Node) -> Result<Node> {
        let Some(lengths) = lengths else { return Ok(scores) };
        let both = [self.intermediate(BOOL, scores.dims)?, self.intermediate(BOOL, scores.dims)?];
        for (index, inside) in self.indices(scores)?.into_iter().zip(both) {
            self.pointwise_into(LESS, BOOL, None, index, Some(lengths), None, inside)?;
        }
        let seen = self.intermediate(BOOL, scores.dims)?;
        self.pointwise_into(AND, BOOL, None, both[0], Some(both[1]), None, seen)?;
        self.where_seen(scores, seen, negative_infinity)
    }

    /// Returns the row and the column of each score.
    fn indices(&mut self, scores: Node) -> Result<[Node; 2]> {
        let (row, column) = (self.intermediate(I32, scores.dims)?, self.intermediate(I32, scores.dims)?);
        self.pointwise_into(INDEX, F32, Some(2), scores, None, None, row)?;
        self.pointwise_into(INDEX, F32, Some(3), scores, None, None, column)?;
        Ok([row, column])
    }

    fn where_seen(&mut self, scores: Node, seen: Node, negative_infinity: Node) -> Result<Node> {
        let masked = self.intermediate(F32, scores.dims)?;
        self.pointwise_into(SELECT, F32, None, scores, Some(negative_infinity), Some(seen), masked)?;
        Ok(masked)
    }
}
