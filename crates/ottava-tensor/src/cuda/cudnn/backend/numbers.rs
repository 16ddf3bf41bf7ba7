//! The numbers of cuDNN's backend API, from `cudnn_graph.h`.

/// The descriptor kinds, `cudnnBackendDescriptorType_t`.
pub mod kind {
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

/// The attributes, `cudnnBackendAttributeName_t`.
pub mod attribute {
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
    pub const POINTWISE_DX: i32 = 756;
    pub const POINTWISE_DY: i32 = 757;
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
    pub const TENSOR_RAGGED_OFFSET: i32 = 913;
    pub const PACK_IDS: i32 = 1000;
    pub const PACK_POINTERS: i32 = 1001;
    pub const PACK_WORKSPACE: i32 = 1003;
    pub const MATMUL_PRECISION: i32 = 1500;
    pub const MATMUL_A: i32 = 1520;
    pub const MATMUL_B: i32 = 1521;
    pub const MATMUL_C: i32 = 1522;
    pub const MATMUL_OPERATION: i32 = 1523;
    pub const MATMUL_ROWS: i32 = 1525;
    pub const MATMUL_COLUMNS: i32 = 1526;
    pub const MATMUL_CONTRACTED: i32 = 1527;
    pub const REDUCTION_OPERATOR: i32 = 1600;
    pub const REDUCTION_PRECISION: i32 = 1601;
    pub const REDUCTION_X: i32 = 1610;
    pub const REDUCTION_Y: i32 = 1611;
    pub const REDUCTION_OPERATION: i32 = 1612;
    pub const RESHAPE_X: i32 = 2200;
    pub const RESHAPE_Y: i32 = 2201;
    pub const DEVICE_JSON: i32 = 2702;
}

/// The type of an attribute's value, `cudnnBackendAttributeType_t`.
#[derive(Clone, Copy)]
pub enum As {
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
pub const F32: i32 = 0;
pub const F16: i32 = 2;
pub const I32: i32 = 4;
pub const BF16: i32 = 9;
pub const I64: i32 = 10;
pub const BOOL: i32 = 11;

/// `cudnnPointwiseMode_t`.
pub const ADD: i32 = 0;
pub const MUL: i32 = 1;
pub const DIV: i32 = 6;
pub const SUB: i32 = 9;
pub const EXP: i32 = 13;
pub const LOG: i32 = 15;
pub const IDENTITY: i32 = 21;
pub const TANH: i32 = 101;
pub const TANH_GRADIENT: i32 = 201;
pub const GREATER: i32 = 302;
pub const GREATER_OR_EQUAL: i32 = 303;
pub const LESS: i32 = 304;
pub const AND: i32 = 400;
pub const INDEX: i32 = 501;
pub const SELECT: i32 = 601;

/// `cudnnReduceTensorOp_t`.
pub const SUM: i32 = 0;
pub const MAX: i32 = 3;
