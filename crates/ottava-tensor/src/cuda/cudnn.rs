//! cuDNN: causal attention in BF16, forward and backward, built from the backend API.
//!
//! Attention is described as a graph of plain operations (product, mask, softmax, product), which cuDNN recognises and
//! runs as one fused kernel. The pattern is fixed: a graph that differs from it, if only in a stride of an
//! intermediate, gets no plan. Graphs can be planned from a description of a GPU that is not there.

use super::driver::{Context, Handle, library_error};
use super::load::{CUDNN, LibraryReport, Problem, SearchPath, SharedLibrary, dotted, functions};
use crate::error::{Error, Result};
use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_void};
use std::ptr::null_mut;
use std::sync::{Arc, OnceLock};

/// What one attention call computes. `q` and `o` are `[B, T, H, D]`, `k` and `v` `[B, T, Hkv, D]`, with heads
/// contiguous and a free distance between tokens, so that `q`, `k` and `v` may lie in one buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttentionShape {
    /// Sequences.
    pub batch: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Tokens of each sequence.
    pub seq: usize,
    /// Elements of a head: a multiple of 8, at most 128.
    pub head_dim: usize,
    /// Elements from one token's queries to the next one's; the same for `dq`.
    pub q_stride: usize,
    /// Elements from one token's keys to the next one's; the same for `dk`.
    pub k_stride: usize,
    /// Elements from one token's values to the next one's; the same for `dv`.
    pub v_stride: usize,
    /// Elements from one token's output to the next one's; the same for its gradient.
    pub o_stride: usize,
}

impl AttentionShape {
    /// Queries, keys and values side by side in one row per token, `[B * T, (H + 2 Hkv) * D]`, and a contiguous output.
    pub fn fused([batch, seq]: [usize; 2], heads: usize, kv_heads: usize, head_dim: usize) -> AttentionShape {
        let row = (heads + 2 * kv_heads) * head_dim;
        AttentionShape {
            batch,
            heads,
            kv_heads,
            seq,
            head_dim,
            q_stride: row,
            k_stride: row,
            v_stride: row,
            o_stride: heads * head_dim,
        }
    }

    /// Elements of the log-sum-exp, `[B, H, T]` in F32.
    pub fn lse_len(&self) -> usize {
        self.batch * self.heads * self.seq
    }

    fn check(&self) -> Result<()> {
        let wrong = |text: String| Err(Error::Value(format!("attention: {text}")));
        if [self.batch, self.heads, self.kv_heads, self.seq].contains(&0) {
            return wrong(format!("an empty dimension in {self:?}"));
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            return wrong(format!("{} query heads cannot share {} key heads evenly", self.heads, self.kv_heads));
        }
        if self.head_dim == 0 || !self.head_dim.is_multiple_of(8) || self.head_dim > 128 {
            return wrong(format!("head size {} is not a multiple of 8 up to 128", self.head_dim));
        }
        let (q, kv) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        for (name, stride, row) in
            [("q", self.q_stride, q), ("k", self.k_stride, kv), ("v", self.v_stride, kv), ("o", self.o_stride, q)]
        {
            if stride < row || !stride.is_multiple_of(8) {
                return wrong(format!("the stride of {name} is {stride}, not a multiple of 8 of at least {row}"));
            }
        }
        Ok(())
    }

    fn q_dims(&self) -> Dims {
        [self.batch, self.heads, self.seq, self.head_dim].map(|dim| dim as i64)
    }

    fn kv_dims(&self) -> Dims {
        [self.batch, self.kv_heads, self.seq, self.head_dim].map(|dim| dim as i64)
    }

    /// Strides of `[B, H, T, D]` where a token's row takes `row` elements.
    fn strides(&self, row: usize) -> Dims {
        [self.seq * row, self.head_dim, row, 1].map(|stride| stride as i64)
    }

    fn score_dims(&self) -> Dims {
        [self.batch, self.heads, self.seq, self.seq].map(|dim| dim as i64)
    }

    /// One number per query and head.
    fn row_dims(&self) -> Dims {
        [self.batch, self.heads, self.seq, 1].map(|dim| dim as i64)
    }
}

/// Device pointers of the forward pass: reads `q`, `k`, `v`; writes `o` and `lse`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AttentionForward {
    pub(crate) q: u64,
    pub(crate) k: u64,
    pub(crate) v: u64,
    pub(crate) o: u64,
    pub(crate) lse: u64,
}

/// Device pointers of the backward pass: reads all of the forward pass and `d_o`; writes `dq`, `dk`, `dv`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AttentionBackward {
    pub(crate) forward: AttentionForward,
    pub(crate) d_o: u64,
    pub(crate) dq: u64,
    pub(crate) dk: u64,
    pub(crate) dv: u64,
}

functions! {
    struct Api {
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

/// Descriptor kinds, `cudnnBackendDescriptorType_t`.
mod kind {
    pub const POINTWISE: i32 = 0;
    pub const ENGINE_CONFIG: i32 = 3;
    pub const HEURISTICS: i32 = 4;
    pub const PLAN: i32 = 5;
    pub const POINTWISE_OPERATION: i32 = 13;
    pub const OPERATION_GRAPH: i32 = 15;
    pub const VARIANT_PACK: i32 = 16;
    pub const TENSOR: i32 = 17;
    pub const MATMUL: i32 = 18;
    pub const MATMUL_OPERATION: i32 = 19;
    pub const REDUCTION: i32 = 21;
    pub const REDUCTION_OPERATION: i32 = 22;
    pub const RESHAPE_OPERATION: i32 = 31;
    pub const DEVICE_PROPERTIES: i32 = 38;
}

/// Attributes, `cudnnBackendAttributeName_t`.
mod attribute {
    pub const POINTWISE_MODE: i32 = 0;
    pub const POINTWISE_PRECISION: i32 = 1;
    pub const POINTWISE_AXIS: i32 = 9;
    pub const HEURISTICS_MODE: i32 = 200;
    pub const HEURISTICS_GRAPH: i32 = 201;
    pub const HEURISTICS_RESULTS: i32 = 202;
    pub const HEURISTICS_DEVICE: i32 = 204;
    pub const PLAN_HANDLE: i32 = 400;
    pub const PLAN_CONFIG: i32 = 401;
    pub const PLAN_WORKSPACE: i32 = 402;
    pub const PLAN_DEVICE: i32 = 407;
    pub const POINTWISE_OPERATION: i32 = 750;
    pub const POINTWISE_X: i32 = 751;
    pub const POINTWISE_B: i32 = 752;
    pub const POINTWISE_Y: i32 = 753;
    pub const POINTWISE_T: i32 = 758;
    pub const GRAPH_HANDLE: i32 = 800;
    pub const GRAPH_OPERATIONS: i32 = 801;
    pub const TENSOR_ALIGNMENT: i32 = 900;
    pub const TENSOR_TYPE: i32 = 901;
    pub const TENSOR_DIMS: i32 = 902;
    pub const TENSOR_STRIDES: i32 = 903;
    pub const TENSOR_ID: i32 = 906;
    pub const TENSOR_VIRTUAL: i32 = 907;
    pub const TENSOR_BY_VALUE: i32 = 908;
    pub const PACK_IDS: i32 = 1000;
    pub const PACK_POINTERS: i32 = 1001;
    pub const PACK_WORKSPACE: i32 = 1003;
    pub const MATMUL_PRECISION: i32 = 1500;
    pub const MATMUL_A: i32 = 1520;
    pub const MATMUL_B: i32 = 1521;
    pub const MATMUL_C: i32 = 1522;
    pub const MATMUL_OPERATION: i32 = 1523;
    pub const REDUCTION_OPERATOR: i32 = 1600;
    pub const REDUCTION_PRECISION: i32 = 1601;
    pub const REDUCTION_X: i32 = 1610;
    pub const REDUCTION_Y: i32 = 1611;
    pub const REDUCTION_OPERATION: i32 = 1612;
    pub const RESHAPE_X: i32 = 2200;
    pub const RESHAPE_Y: i32 = 2201;
    pub const DEVICE_JSON: i32 = 2702;
}

/// How an attribute's value is passed, `cudnnBackendAttributeType_t`.
#[derive(Clone, Copy)]
enum As {
    Handle = 0,
    DataType = 1,
    Bool = 2,
    I64 = 3,
    Pointer = 6,
    HeuristicMode = 8,
    PointwiseMode = 14,
    Descriptor = 15,
    ReductionOperator = 18,
    Char = 24,
}

/// Element types, `cudnnDataType_t`.
const F32: i32 = 0;
const I32: i32 = 4;
const BF16: i32 = 9;
const BOOL: i32 = 11;

/// `cudnnPointwiseMode_t`.
const ADD: i32 = 0;
const MUL: i32 = 1;
const DIV: i32 = 6;
const SUB: i32 = 9;
const EXP: i32 = 13;
const LOG: i32 = 15;
const IDENTITY: i32 = 21;
const GREATER_OR_EQUAL: i32 = 303;
const INDEX: i32 = 501;
const SELECT: i32 = 601;

/// `cudnnReduceTensorOp_t`.
const SUM: i32 = 0;
const MAX: i32 = 3;

/// `cudnnBackendHeurMode_t`: A, then the fallback.
const HEURISTICS: [i32; 2] = [3, 2];
/// Proposals of the heuristics that are tried until one becomes a plan.
const PROPOSALS: i64 = 16;

fn opened() -> &'static Result<Api, Problem> {
    static OPENED: OnceLock<Result<Api, Problem>> = OnceLock::new();
    OPENED.get_or_init(|| {
        // cuDNN opens these two by name, which the linker cannot find in a Python package unless they are open.
        let _ = (super::nvrtc::require(), super::cublaslt::require());
        SharedLibrary::open(&CUDNN, SearchPath::of_process()).and_then(Api::load)
    })
}

fn api() -> Result<&'static Api> {
    opened().as_ref().map_err(|problem| problem.clone().into())
}

pub(super) fn report() -> LibraryReport {
    // SAFETY: plain call.
    LibraryReport::new(&CUDNN, opened(), |api| &api.library, |api| Some(dotted(unsafe { (api.version)() })))
}

impl Api {
    fn check(&self, status: i32, call: &str) -> Result<()> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: the library returns a constant string for any status.
        let text = unsafe { (self.error_string)(status) };
        let name = if text.is_null() {
            format!("status {status}")
        } else {
            // SAFETY: not null, and constant.
            unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
        };
        let mut detail = [0u8; 1024];
        // SAFETY: the library writes at most the given length and ends it with a zero.
        unsafe { (self.last_error)(detail.as_mut_ptr().cast(), detail.len()) };
        let detail = CStr::from_bytes_until_nul(&detail).map(|text| text.to_string_lossy()).unwrap_or_default();
        let message = if detail.is_empty() { name } else { format!("{name}: {detail}") };
        Err(Error::Cuda { library: CUDNN.name, call: call.to_string(), message })
    }
}

/// A descriptor of the backend API, destroyed on the way out.
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

    /// Sets an attribute to values of the C type that `kind` stands for.
    fn set<T: Copy>(self, attribute: i32, kind: As, values: &[T]) -> Result<Descriptor> {
        // SAFETY: the library copies as many values as said.
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
        // SAFETY: created in `new`, not used again.
        unsafe { (self.api.destroy)(self.raw) };
    }
}

type Dims = [i64; 4];

fn row_major(dims: Dims) -> Dims {
    [dims[1] * dims[2] * dims[3], dims[2] * dims[3], dims[3], 1]
}

/// The same tensor with its last two dimensions exchanged.
fn transposed([a, b, c, d]: Dims) -> Dims {
    [a, b, d, c]
}

/// The tensors of a graph that have memory, by the number under which it is passed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Slot {
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
    // These three are read on the host when the graph is enqueued.
    Scale,
    NegativeInfinity,
    One,
}

/// Intermediates are numbered from here.
const FIRST_VIRTUAL: i64 = 100;

/// A tensor of a graph under construction.
#[derive(Clone, Copy)]
struct Node {
    index: usize,
    dims: Dims,
}

/// A graph under construction. Every method adds an operation and returns its result.
struct Graph {
    api: &'static Api,
    tensors: Vec<Descriptor>,
    operations: Vec<Descriptor>,
    /// Descriptors the operations refer to.
    parts: Vec<Descriptor>,
}

impl Graph {
    fn new(api: &'static Api) -> Graph {
        Graph { api, tensors: Vec::new(), operations: Vec::new(), parts: Vec::new() }
    }

    fn tensor(&mut self, dtype: i32, dims: Dims, strides: Dims, slot: Option<Slot>) -> Result<Node> {
        let index = self.tensors.len();
        let id = slot.map_or(FIRST_VIRTUAL + index as i64, |slot| slot as i64);
        let by_value = matches!(slot, Some(Slot::Scale | Slot::NegativeInfinity | Slot::One));
        let tensor = Descriptor::new(self.api, kind::TENSOR)?
            .set(attribute::TENSOR_TYPE, As::DataType, &[dtype])?
            .set(attribute::TENSOR_DIMS, As::I64, &dims)?
            .set(attribute::TENSOR_STRIDES, As::I64, &strides)?
            .set(attribute::TENSOR_ID, As::I64, &[id])?
            .set(attribute::TENSOR_ALIGNMENT, As::I64, &[16i64])?
            .set(attribute::TENSOR_VIRTUAL, As::Bool, &[u8::from(slot.is_none())])?
            .set(attribute::TENSOR_BY_VALUE, As::Bool, &[u8::from(by_value)])?;
        self.tensors.push(tensor.finish("a tensor")?);
        Ok(Node { index, dims })
    }

    fn input(&mut self, slot: Slot, dtype: i32, dims: Dims, strides: Dims) -> Result<Node> {
        self.tensor(dtype, dims, strides, Some(slot))
    }

    fn scalar(&mut self, slot: Slot) -> Result<Node> {
        self.tensor(F32, [1; 4], [1; 4], Some(slot))
    }

    fn intermediate(&mut self, dtype: i32, dims: Dims) -> Result<Node> {
        self.tensor(dtype, dims, row_major(dims), None)
    }

    fn raw(&self, node: Node) -> Handle {
        self.tensors[node.index].raw
    }

    /// `y = mode(x, b)`, or `t ? x : b` for a selection; `axis` is for [`INDEX`].
    #[allow(clippy::too_many_arguments, reason = "the operands of one operation of the library")]
    fn pointwise_into(
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

    /// `mode(x, b)` in F32, shaped like `x`.
    fn pointwise(&mut self, mode: i32, x: Node, b: Option<Node>) -> Result<Node> {
        let y = self.intermediate(F32, x.dims)?;
        self.pointwise_into(mode, F32, None, x, b, None, y)?;
        Ok(y)
    }

    fn matmul_into(&mut self, a: Node, b: Node, c: Node) -> Result<()> {
        let part = Descriptor::new(self.api, kind::MATMUL)?
            .set(attribute::MATMUL_PRECISION, As::DataType, &[F32])?
            .finish("a product's type")?;
        let operation = Descriptor::new(self.api, kind::MATMUL_OPERATION)?
            .set(attribute::MATMUL_A, As::Descriptor, &[self.raw(a)])?
            .set(attribute::MATMUL_B, As::Descriptor, &[self.raw(b)])?
            .set(attribute::MATMUL_C, As::Descriptor, &[self.raw(c)])?
            .set(attribute::MATMUL_OPERATION, As::Descriptor, &[part.raw])?;
        self.parts.push(part);
        self.operations.push(operation.finish("a product")?);
        Ok(())
    }

    fn reduce_into(&mut self, operator: i32, x: Node, y: Node) -> Result<()> {
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

    fn reduce(&mut self, operator: i32, x: Node, dims: Dims) -> Result<Node> {
        let y = self.intermediate(F32, dims)?;
        self.reduce_into(operator, x, y)?;
        Ok(y)
    }

    /// `x` seen with its last two dimensions exchanged, in BF16.
    fn transpose(&mut self, x: Node, strides: Dims) -> Result<Node> {
        let y = self.tensor(BF16, transposed(x.dims), strides, None)?;
        let operation = Descriptor::new(self.api, kind::RESHAPE_OPERATION)?
            .set(attribute::RESHAPE_X, As::Descriptor, &[self.raw(x)])?
            .set(attribute::RESHAPE_Y, As::Descriptor, &[self.raw(y)])?;
        self.operations.push(operation.finish("a transposition")?);
        Ok(y)
    }

    /// Scores with minus infinity where a query would see a later key.
    fn causal(&mut self, scores: Node, negative_infinity: Node) -> Result<Node> {
        let dims = scores.dims;
        let (row, column) = (self.intermediate(I32, dims)?, self.intermediate(I32, dims)?);
        self.pointwise_into(INDEX, F32, Some(2), scores, None, None, row)?;
        self.pointwise_into(INDEX, F32, Some(3), scores, None, None, column)?;
        let seen = self.intermediate(BOOL, dims)?;
        self.pointwise_into(GREATER_OR_EQUAL, BOOL, None, row, Some(column), None, seen)?;
        let masked = self.intermediate(F32, dims)?;
        self.pointwise_into(SELECT, F32, None, scores, Some(negative_infinity), Some(seen), masked)?;
        Ok(masked)
    }

    /// The first proposal of the heuristics that becomes a plan.
    fn plan(self, on: &On) -> Result<Plan> {
        let api = self.api;
        let operations: Vec<Handle> = self.operations.iter().map(|operation| operation.raw).collect();
        let mut graph = Descriptor::new(api, kind::OPERATION_GRAPH)?.set(
            attribute::GRAPH_OPERATIONS,
            As::Descriptor,
            &operations,
        )?;
        if let On::Handle(handle) = on {
            graph = graph.set(attribute::GRAPH_HANDLE, As::Handle, &[*handle])?;
        }
        let graph = graph.finish("an operation graph")?;
        let mut refusals: Vec<String> = Vec::new();
        for mode in HEURISTICS {
            let configs = match self.proposals(&graph, mode, on) {
                Ok(configs) => configs,
                Err(error) => {
                    refusals.push(error.to_string());
                    continue;
                }
            };
            for config in configs {
                let plan =
                    Descriptor::new(api, kind::PLAN)?.set(attribute::PLAN_CONFIG, As::Descriptor, &[config.raw])?;
                let plan = match on {
                    On::Handle(handle) => plan.set(attribute::PLAN_HANDLE, As::Handle, &[*handle])?,
                    On::Properties(device) => plan.set(attribute::PLAN_DEVICE, As::Descriptor, &[device.raw])?,
                };
                match plan.finish("an execution plan") {
                    Ok(plan) => {
                        let workspace = workspace_of(&plan)?;
                        return Ok(Plan { plan, workspace, _parts: (self, graph, config) });
                    }
                    Err(error) => refusals.push(error.to_string()),
                }
            }
        }
        refusals.dedup();
        let message = if refusals.is_empty() { "no engine takes this graph".to_string() } else { refusals.join("; ") };
        Err(Error::Cuda { library: CUDNN.name, call: "planning attention".to_string(), message })
    }

    fn proposals(&self, graph: &Descriptor, mode: i32, on: &On) -> Result<Vec<Descriptor>> {
        let api = self.api;
        let mut heuristics = Descriptor::new(api, kind::HEURISTICS)?
            .set(attribute::HEURISTICS_GRAPH, As::Descriptor, &[graph.raw])?
            .set(attribute::HEURISTICS_MODE, As::HeuristicMode, &[mode])?;
        if let On::Properties(device) = on {
            heuristics = heuristics.set(attribute::HEURISTICS_DEVICE, As::Descriptor, &[device.raw])?;
        }
        let heuristics = heuristics.finish("heuristics")?;
        let get = |count: i64, found: &mut i64, into: *mut c_void| {
            // SAFETY: the library writes at most `count` results into descriptors that exist, and their number.
            let status = unsafe {
                (api.get)(heuristics.raw, attribute::HEURISTICS_RESULTS, As::Descriptor as i32, count, found, into)
            };
            api.check(status, "the results of the heuristics")
        };
        let mut found = 0;
        get(0, &mut found, null_mut())?;
        let wanted = found.clamp(0, PROPOSALS);
        let mut configs = (0..wanted).map(|_| Descriptor::new(api, kind::ENGINE_CONFIG)).collect::<Result<Vec<_>>>()?;
        let mut raw: Vec<Handle> = configs.iter().map(|config| config.raw).collect();
        get(wanted, &mut found, raw.as_mut_ptr().cast())?;
        configs.truncate(found.max(0) as usize);
        Ok(configs)
    }
}

fn workspace_of(plan: &Descriptor) -> Result<usize> {
    let (mut bytes, mut count) = (0i64, 0i64);
    // SAFETY: the library writes one 64-bit integer.
    let status = unsafe {
        let into = (&raw mut bytes).cast();
        (plan.api.get)(plan.raw, attribute::PLAN_WORKSPACE, As::I64 as i32, 1, &mut count, into)
    };
    plan.api.check(status, "the workspace of a plan")?;
    Ok(bytes.max(0) as usize)
}

/// What a graph is planned for.
enum On {
    /// The device of a handle.
    Handle(Handle),
    /// A device that need not be here.
    Properties(Descriptor),
}

/// A graph that can run.
struct Plan {
    plan: Descriptor,
    workspace: usize,
    /// The plan refers to all of these.
    _parts: (Graph, Descriptor, Descriptor),
}

impl Plan {
    /// Enqueues the graph.
    ///
    /// # Safety
    /// Each slot of the graph has a pointer to memory of its shape, the last three of [`Slot`] on the host.
    unsafe fn enqueue(&self, handle: Handle, bindings: &[(Slot, u64)], workspace: u64) -> Result<()> {
        let ids: Vec<i64> = bindings.iter().map(|(slot, _)| *slot as i64).collect();
        let pointers: Vec<u64> = bindings.iter().map(|(_, pointer)| *pointer).collect();
        let api = self.plan.api;
        let pack = Descriptor::new(api, kind::VARIANT_PACK)?
            .set(attribute::PACK_IDS, As::I64, &ids)?
            .set(attribute::PACK_POINTERS, As::Pointer, &pointers)?
            .set(attribute::PACK_WORKSPACE, As::Pointer, &[workspace])?
            .finish("a set of pointers")?;
        // SAFETY: the caller's promise.
        api.check(unsafe { (api.execute)(handle, self.plan.raw, pack.raw) }, "cudnnBackendExecute")
    }
}

/// `S = scale · Q Kᵀ`, masked; `P = softmax(S)`; `O = P V`; `lse = log Σ exp S`.
fn forward_graph(api: &'static Api, shape: &AttentionShape) -> Result<Graph> {
    let mut g = Graph::new(api);
    let (q_dims, kv_dims, row_dims) = (shape.q_dims(), shape.kv_dims(), shape.row_dims());
    let q = g.input(Slot::Q, BF16, q_dims, shape.strides(shape.q_stride))?;
    let k = g.input(Slot::K, BF16, transposed(kv_dims), transposed(shape.strides(shape.k_stride)))?;
    let v = g.input(Slot::V, BF16, kv_dims, shape.strides(shape.v_stride))?;
    let o = g.input(Slot::O, BF16, q_dims, shape.strides(shape.o_stride))?;
    let lse = g.input(Slot::Lse, F32, row_dims, row_major(row_dims))?;
    let (scale, negative_infinity) = (g.scalar(Slot::Scale)?, g.scalar(Slot::NegativeInfinity)?);

    let scores = g.intermediate(F32, shape.score_dims())?;
    g.matmul_into(q, k, scores)?;
    let scores = g.pointwise(MUL, scores, Some(scale))?;
    let scores = g.causal(scores, negative_infinity)?;
    let largest = g.reduce(MAX, scores, row_dims)?;
    let shifted = g.pointwise(SUB, scores, Some(largest))?;
    let exponentials = g.pointwise(EXP, shifted, None)?;
    let sum = g.reduce(SUM, exponentials, row_dims)?;
    let log = g.pointwise(LOG, sum, None)?;
    g.pointwise_into(ADD, F32, None, largest, Some(log), None, lse)?;
    let p = g.intermediate(BF16, shape.score_dims())?;
    g.pointwise_into(DIV, F32, None, exponentials, Some(sum), None, p)?;
    g.matmul_into(p, v, o)?;
    Ok(g)
}

/// With `P = exp(S - lse)` made again: `dV = Pᵀ dO`, `dS = P ∘ (dO Vᵀ - rowsum(dO ∘ O)) · scale`, `dK = dSᵀ Q`,
/// `dQ = dS K`; key heads sum over the query heads that share them.
fn backward_graph(api: &'static Api, shape: &AttentionShape) -> Result<Graph> {
    let mut g = Graph::new(api);
    let (q_dims, kv_dims, row_dims) = (shape.q_dims(), shape.kv_dims(), shape.row_dims());
    let (q_strides, o_strides) = (shape.strides(shape.q_stride), shape.strides(shape.o_stride));
    let (k_strides, v_strides) = (shape.strides(shape.k_stride), shape.strides(shape.v_stride));
    let q = g.input(Slot::Q, BF16, q_dims, q_strides)?;
    let k = g.input(Slot::K, BF16, transposed(kv_dims), transposed(k_strides))?;
    let v = g.input(Slot::V, BF16, transposed(kv_dims), transposed(v_strides))?;
    let o = g.input(Slot::O, BF16, q_dims, o_strides)?;
    let d_o = g.input(Slot::DO, BF16, q_dims, o_strides)?;
    let lse = g.input(Slot::Lse, F32, row_dims, row_major(row_dims))?;
    let dq = g.input(Slot::DQ, BF16, q_dims, q_strides)?;
    let dk = g.input(Slot::DK, BF16, kv_dims, k_strides)?;
    let dv = g.input(Slot::DV, BF16, kv_dims, v_strides)?;
    let row_sum = g.input(Slot::RowSum, F32, row_dims, row_major(row_dims))?;
    let dq_sum = g.input(Slot::DQSum, F32, q_dims, row_major(q_dims))?;
    let (scale, negative_infinity) = (g.scalar(Slot::Scale)?, g.scalar(Slot::NegativeInfinity)?);
    let one = g.scalar(Slot::One)?;
    // The score matrix seen by its columns.
    let score_strides = row_major(shape.score_dims());
    let by_columns = transposed(score_strides);

    let product = g.pointwise(MUL, d_o, Some(o))?;
    let sum = g.reduce(SUM, product, row_dims)?;
    g.pointwise_into(MUL, F32, None, sum, Some(one), None, row_sum)?;

    let scores = g.intermediate(F32, shape.score_dims())?;
    g.matmul_into(q, k, scores)?;
    let scores = g.pointwise(MUL, scores, Some(scale))?;
    let shifted = g.pointwise(SUB, scores, Some(lse))?;
    let masked = g.causal(shifted, negative_infinity)?;
    let p = g.pointwise(EXP, masked, None)?;

    let sum_over_group = |g: &mut Graph, a: Node, b: Node, out: Node| {
        if shape.heads == shape.kv_heads {
            return g.matmul_into(a, b, out);
        }
        let per_head = g.intermediate(BF16, q_dims)?;
        g.matmul_into(a, b, per_head)?;
        g.reduce_into(SUM, per_head, out)
    };
    let p_by_columns = g.transpose(p, by_columns)?;
    sum_over_group(&mut g, p_by_columns, d_o, dv)?;

    let dp = g.intermediate(F32, shape.score_dims())?;
    g.matmul_into(d_o, v, dp)?;
    let ds = g.pointwise(SUB, dp, Some(row_sum))?;
    let ds = g.pointwise(MUL, ds, Some(p))?;
    let ds = g.pointwise(MUL, ds, Some(scale))?;
    let ds_by_columns = g.transpose(ds, by_columns)?;
    sum_over_group(&mut g, ds_by_columns, q, dk)?;

    let k_rows = g.transpose(k, k_strides)?;
    g.matmul_into(ds, k_rows, dq_sum)?;
    g.pointwise_into(IDENTITY, F32, None, dq_sum, None, None, dq)?;
    Ok(g)
}

/// The two passes, each with its own graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Pass {
    Forward,
    Backward,
}

impl Pass {
    fn graph(self, api: &'static Api, shape: &AttentionShape) -> Result<Graph> {
        shape.check()?;
        match self {
            Pass::Forward => forward_graph(api, shape),
            Pass::Backward => backward_graph(api, shape),
        }
    }
}

/// Plans both passes for a device described by cuDNN's JSON of its properties. Needs the driver's library but no GPU.
/// Returns the bytes of scratch memory that forward and backward would need.
///
/// Errors: [`Error::Library`] without cuDNN, [`Error::Cuda`] when it has no kernel for the shape.
pub fn plan_attention(device_json: &str, shape: &AttentionShape) -> Result<[usize; 2]> {
    let api = api()?;
    let device = Descriptor::new(api, kind::DEVICE_PROPERTIES)?
        .set(attribute::DEVICE_JSON, As::Char, device_json.as_bytes())?
        .finish("device properties")?;
    let on = On::Properties(device);
    let forward = Pass::Forward.graph(api, shape)?.plan(&on)?;
    let backward = Pass::Backward.graph(api, shape)?.plan(&on)?;
    Ok([forward.workspace, backward.workspace])
}

/// cuDNN on one device, with the plans made so far.
pub(super) struct Attention {
    api: &'static Api,
    handle: Handle,
    context: Arc<Context>,
    plans: HashMap<(AttentionShape, Pass), Plan>,
}

// SAFETY: a handle may move between threads; `Attention` is used by one at a time, behind a Mutex.
unsafe impl Send for Attention {}

impl Attention {
    pub(super) fn open(context: &Arc<Context>) -> Result<Attention> {
        let api = api()?;
        context.bind()?;
        let mut attention = Attention { api, handle: null_mut(), context: context.clone(), plans: HashMap::new() };
        // SAFETY: the library writes one handle, which `Drop` destroys.
        api.check(unsafe { (api.create_handle)(&mut attention.handle) }, "cudnnCreate")?;
        // SAFETY: the stream lives as long as the context, which is held.
        api.check(unsafe { (api.set_stream)(attention.handle, context.stream()) }, "cudnnSetStream")?;
        Ok(attention)
    }

    /// Bytes of scratch memory a pass needs; makes its plan on the first call.
    pub(super) fn prepare(&mut self, shape: &AttentionShape, pass: Pass) -> Result<usize> {
        self.context.bind()?;
        if !self.plans.contains_key(&(*shape, pass)) {
            let plan = pass.graph(self.api, shape)?.plan(&On::Handle(self.handle))?;
            self.plans.insert((*shape, pass), plan);
        }
        Ok(self.plans[&(*shape, pass)].workspace)
    }

    /// Enqueues the forward pass; [`Attention::prepare`] came before.
    ///
    /// # Safety
    /// The pointers name device memory of the shape, `workspace` as much as `prepare` said.
    pub(super) unsafe fn forward(
        &self,
        shape: &AttentionShape,
        scale: f32,
        pointers: &AttentionForward,
        workspace: u64,
    ) -> Result<()> {
        let AttentionForward { q, k, v, o, lse } = *pointers;
        let bindings = [(Slot::Q, q), (Slot::K, k), (Slot::V, v), (Slot::O, o), (Slot::Lse, lse)];
        // SAFETY: the caller's promise.
        unsafe { self.enqueue(shape, Pass::Forward, scale, &bindings, workspace) }
    }

    /// Enqueues the backward pass; [`Attention::prepare`] came before.
    ///
    /// # Safety
    /// As for [`Attention::forward`]; `row_sum` is `[B, H, T]` and `dq_sum` `[B, H, T, D]`, both F32, the latter zeros.
    pub(super) unsafe fn backward(
        &self,
        shape: &AttentionShape,
        scale: f32,
        pointers: &AttentionBackward,
        [row_sum, dq_sum]: [u64; 2],
        workspace: u64,
    ) -> Result<()> {
        let AttentionBackward { forward: AttentionForward { q, k, v, o, lse }, d_o, dq, dk, dv } = *pointers;
        let bindings = [
            (Slot::Q, q),
            (Slot::K, k),
            (Slot::V, v),
            (Slot::O, o),
            (Slot::Lse, lse),
            (Slot::DO, d_o),
            (Slot::DQ, dq),
            (Slot::DK, dk),
            (Slot::DV, dv),
            (Slot::RowSum, row_sum),
            (Slot::DQSum, dq_sum),
        ];
        // SAFETY: the caller's promise.
        unsafe { self.enqueue(shape, Pass::Backward, scale, &bindings, workspace) }
    }

    /// # Safety
    /// As for [`Plan::enqueue`], without the scalars.
    unsafe fn enqueue(
        &self,
        shape: &AttentionShape,
        pass: Pass,
        scale: f32,
        bindings: &[(Slot, u64)],
        workspace: u64,
    ) -> Result<()> {
        let scalars = [(Slot::Scale, scale), (Slot::NegativeInfinity, f32::NEG_INFINITY), (Slot::One, 1.0)];
        let mut bindings = bindings.to_vec();
        let used = if pass == Pass::Forward { 2 } else { 3 };
        bindings.extend(scalars[..used].iter().map(|(slot, value)| (*slot, std::ptr::from_ref(value) as u64)));
        let plan = self.plans.get(&(*shape, pass)).expect("prepare made the plan");
        self.context.bind()?;
        self.context.note("attention");
        // SAFETY: the caller's promise; the scalars live until the call returns.
        match unsafe { plan.enqueue(self.handle, &bindings, workspace) } {
            Err(Error::Cuda { library, call, message }) => Err(library_error(&self.context, library, &call, message)),
            other => other,
        }
    }
}

impl Drop for Attention {
    fn drop(&mut self) {
        let _ = self.context.bind();
        self.plans.clear();
        // SAFETY: created in `open`, not used again.
        unsafe { (self.api.destroy_handle)(self.handle) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An H200 as cuDNN describes it.
    const H200: &str = r#"{"deviceId":0,"cudaDeviceId":0,"deviceVer":900,"driverVer":13000,"smVersion":900,
        "totalGlobalMem":150754820096,"maxGridSize":[2147483647,65535,65535],"maxBlockSize":[1024,1024,64],
        "regsPerBlock":65536,"multiProcessorCount":132,"warpSize":32,"maxSharedMemoryPerBlock":49152,
        "maxSharedMemoryPerBlockOptin":232448,"reservedSharedMemoryPerBlock":1024,"maxRegistersPerSM":65536,
        "maxCtasPerSM":32,"maxThreadsPerBlock":1024,"maxThreadsPerSM":2048,"pciDeviceId":0,"isTccDriver":0,
        "supportCoopLaunch":1,"smClockRateKHz":1980000,"memClockRateKHz":3201000,"l2CacheSize":62914560,
        "deviceName":"NVIDIA H200"}"#;

    #[test]
    fn graphs_are_planned_for_hopper_from_a_description() {
        // cuDNN loads its kernels while it plans, for which it wants the driver's library if not a GPU.
        if let Err(problem) = super::super::driver::device_count().and_then(|_| api()) {
            eprintln!("skipped: {problem}");
            return;
        }
        for (heads, kv_heads, head_dim, seq) in [(4, 4, 128, 512), (4, 2, 128, 100), (2, 1, 8, 16), (3, 3, 96, 4096)] {
            let shape = AttentionShape::fused([2, seq], heads, kv_heads, head_dim);
            let workspace = plan_attention(H200, &shape).expect("a plan");
            eprintln!("{heads}/{kv_heads} heads of {head_dim}, {seq} tokens: {workspace:?} bytes of scratch");
        }
        let error = plan_attention("{}", &AttentionShape::fused([2, 64], 4, 4, 64)).expect_err("no such device");
        assert!(matches!(error, Error::Cuda { library: "cuDNN", .. }), "{error}");
    }

    #[test]
    fn impossible_shapes_are_named() {
        let fine = AttentionShape::fused([2, 64], 4, 2, 32);
        let cases = [
            (AttentionShape { kv_heads: 3, ..fine }, "share"),
            (AttentionShape { head_dim: 12, ..fine }, "head size"),
            (AttentionShape { head_dim: 136, ..fine }, "head size"),
            (AttentionShape { seq: 0, ..fine }, "empty"),
            (AttentionShape { o_stride: 64, ..fine }, "stride of o"),
            (AttentionShape { q_stride: 260, ..fine }, "stride of q"),
        ];
        assert!(fine.check().is_ok());
        for (shape, words) in cases {
            let message = shape.check().expect_err("an impossible shape").to_string();
            assert!(message.contains(words), "{message}");
        }
    }
}
