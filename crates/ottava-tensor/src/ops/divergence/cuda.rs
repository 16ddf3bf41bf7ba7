use super::{Divergence, TopLogProbs};
use crate::cuda::CudaDevice;
use crate::ops::IGNORE_INDEX;
use crate::ops::declaration::kernels;
use crate::ops::launch;
use crate::{DType, Result, Tensor};

kernels! {
    static SOURCE = { file: "divergence", constants: [IGNORE_INDEX], variants: launch::STORAGE };
    kernel divergence_gradient(
        divergences: *mut f32, student: *mut X, teacher: *const X, targets: *const i32, scale_of_loss: *const f32, beta: f32, temperature: f32,
        vocabulary: i32, of_student: i32, of_teacher: i32
    );
    kernel divergence_gradient_of_top(
        divergences: *mut f32, student: *mut X, logits: *mut f32, ids: *const i32, log_probs: *const f32, rests: *const f32, targets: *const i32,
        scale_of_loss: *const f32, beta: f32, temperature: f32, vocabulary: i32, k: i32, of_student: i32
    );
}

/// Threads per row.
const THREADS: u32 = 512;

#[expect(clippy::too_many_arguments, reason = "the inputs and outputs of the op")]
pub(super) fn divergence_gradient(
    gpu: &CudaDevice,
    student: &mut Tensor,
    teacher: &Tensor,
    vocabulary: usize,
    targets: &Tensor,
    scale: &Tensor,
    Divergence { beta, temperature }: Divergence,
    divergences: &mut Tensor,
) -> Result<()> {
    let ([tokens, of_student], of_teacher) = (student.dims("divergence_gradient: student")?, teacher.shape()[1]);
    let defines = launch::storage(student.dtype())?;
    let entry = kernel::divergence_gradient(
        divergences,
        student,
        teacher,
        targets,
        scale,
        beta,
        temperature,
        vocabulary,
        of_student,
        of_teacher,
    );
    let kernel = SOURCE.kernel(defines, entry);
    // SAFETY: `student` is `tokens · of_student`, `teacher` `tokens · of_teacher`, both rows have `vocabulary` values, `targets` and `divergences` have
    // `tokens` elements, and `scale` one.
    unsafe { gpu.launch(&kernel, [tokens as u32, 1, 1], THREADS, 0) }
}

#[expect(clippy::too_many_arguments, reason = "the inputs and outputs of the op")]
pub(super) fn divergence_gradient_of_top(
    gpu: &CudaDevice,
    student: &mut Tensor,
    TopLogProbs { ids, log_probs, rest }: TopLogProbs,
    vocabulary: usize,
    targets: &Tensor,
    scale: &Tensor,
    Divergence { beta, temperature }: Divergence,
    divergences: &mut Tensor,
) -> Result<()> {
    let ([tokens, of_student], k) = (student.dims("divergence_gradient_of_top: student")?, ids.shape()[1]);
    let defines = launch::storage(student.dtype())?;
    // The student's logits of the teacher's tokens, whose places are overwritten.
    let mut logits = Tensor::empty(student.device(), &[tokens, k], DType::F32)?;
    let entry = kernel::divergence_gradient_of_top(
        divergences,
        student,
        &mut logits,
        ids,
        log_probs,
        rest,
        targets,
        scale,
        beta,
        temperature,
        vocabulary,
        k,
        of_student,
    );
    let kernel = SOURCE.kernel(defines, entry);
    // SAFETY: `student` is `tokens · of_student` and its rows have `vocabulary` values; `logits`, `ids` and `log_probs` are `tokens · k`, and the caller
    // has ids in the vocabulary; `rest`, `targets` and `divergences` have `tokens` elements, and `scale` one.
    unsafe { gpu.launch(&kernel, [tokens as u32, 1, 1], THREADS, 0) }
}
