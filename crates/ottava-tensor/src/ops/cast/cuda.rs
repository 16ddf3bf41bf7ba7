use crate::cuda::CudaDevice;
use crate::ops::declaration::{AddressMut, kernels};
use crate::ops::launch::{self, BLOCK, Defines};
use crate::{Result, Tensor};

kernels! {
    static SOURCE = { file: "cast", variants: VARIANTS };
    kernel cast(y: *mut TO, x: *const FROM, n: u64);
}

const VARIANTS: &[Defines] = &[
    &[("FROM", "f32"), ("TO", "f32")],
    &[("FROM", "f32"), ("TO", "f16")],
    &[("FROM", "f32"), ("TO", "bf16")],
    &[("FROM", "f16"), ("TO", "f32")],
    &[("FROM", "f16"), ("TO", "f16")],
    &[("FROM", "f16"), ("TO", "bf16")],
    &[("FROM", "bf16"), ("TO", "f32")],
    &[("FROM", "bf16"), ("TO", "f16")],
    &[("FROM", "bf16"), ("TO", "bf16")],
];

pub(super) fn cast(gpu: &CudaDevice, x: &Tensor, y: &mut Tensor, first: usize) -> Result<()> {
    let (from, to) = (launch::storage(x.dtype())?[0].1, launch::storage(y.dtype())?[0].1);
    let defines = VARIANTS.iter().find(|v| v[0].1 == from && v[1].1 == to).expect("all pairs are listed");
    let to = y.device_ptr_mut() + (first * y.dtype().size()) as u64;
    let kernel = SOURCE.kernel(defines, kernel::cast(AddressMut(to), x, x.len()));
    // SAFETY: `x`, and `y` from `first` on, have `x.len()` elements of the types in the defines.
    unsafe { gpu.launch(&kernel, launch::elements_by_eight(gpu, x.len()), BLOCK, 0) }
}
