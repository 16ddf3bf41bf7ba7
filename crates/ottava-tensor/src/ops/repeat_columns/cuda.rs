use super::Sections;
use crate::cuda::{CudaDevice, Entry};
use crate::ops::declaration::kernels;
use crate::ops::launch::{self, BLOCK};
use crate::{Result, Tensor};

kernels! {
    static SOURCE = { file: "repeat_columns", variants: launch::STORAGE };
    kernel repeat_columns, repeat_columns_backward(
        y: *mut X, x: *const X, rows: u64, ca: i32, wa: i32, ta: i32, cb: i32, wb: i32, tb: i32, cc: i32, wc: i32, tc: i32
    );
}

/// Returns the columns, the block width and the number of repetitions of each section.
fn of_kernels(sections: &Sections) -> [[usize; 3]; 3] {
    sections.of.each_ref().map(|section| [section.columns, section.block, section.times])
}

pub(super) fn repeat_columns(gpu: &CudaDevice, x: &Tensor, y: &mut Tensor, sections: &Sections) -> Result<()> {
    let ([[ca, wa, ta], [cb, wb, tb], [cc, wc, tc]], rows) = (of_kernels(sections), x.shape()[0]);
    launch(gpu, x, sections, kernel::repeat_columns(y, x, rows, ca, wa, ta, cb, wb, tb, cc, wc, tc))
}

pub(super) fn repeat_columns_backward(
    gpu: &CudaDevice,
    dy: &Tensor,
    dx: &mut Tensor,
    sections: &Sections,
) -> Result<()> {
    let ([[ca, wa, ta], [cb, wb, tb], [cc, wc, tc]], rows) = (of_kernels(sections), dy.shape()[0]);
    launch(gpu, dy, sections, kernel::repeat_columns_backward(dx, dy, rows, ca, wa, ta, cb, wb, tb, cc, wc, tc))
}

/// Launches one thread per column of the matrix that is not repeated.
fn launch(gpu: &CudaDevice, x: &Tensor, sections: &Sections, entry: Entry) -> Result<()> {
    let kernel = SOURCE.kernel(launch::storage(x.dtype())?, entry);
    // SAFETY: the op has checked that one tensor has the columns of the sections and the other has the repeated columns, with equal numbers of rows.
    unsafe { gpu.launch(&kernel, launch::elements(gpu, x.shape()[0] * sections.columns), BLOCK, 0) }
}
