//! Products of formats with small blocks on a GPU without such products.
//!
//! Both operands are dequantized to BF16 without the scales of the tensors, which is exact: a value has at most 6 bits. Tensor cores multiply them and
//! add in F32. With scales of the tensors, the sum is multiplied by the product of both scales, the addend is added, and the result is rounded once, as
//! the products of Blackwell do. Only the order of the sums differs.

use super::{Addend, cuda};
use crate::cuda::CudaDevice;
use crate::ops::dequantize::{block_values, tensor_scale};
use crate::ops::operand::{Accumulation, Operand};
use crate::{DType, Result, Tensor};
use std::sync::Arc;

pub(super) fn gemm(gpu: &Arc<CudaDevice>, a: Operand, b: Operand, out: &mut Tensor, addend: Addend) -> Result<()> {
    let (x, y) = (block_values(a)?, block_values(b)?);
    let (x, y) = (Operand::plain(&x), Operand::plain(&y));
    let (Some(of_a), Some(of_b)) = (tensor_scale(a)?, tensor_scale(b)?) else {
        return cuda::gemm(gpu, x, y, out, Accumulation::Exact, addend);
    };
    let mut sums = Tensor::empty(out.device(), out.shape(), DType::F32)?;
    cuda::gemm(gpu, x, y, &mut sums, Accumulation::Exact, Addend::None)?;
    cuda::scale_and_add(gpu, &sums, [&of_a, &of_b], out, addend)
}
