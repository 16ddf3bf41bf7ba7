use super::Sections;
use crate::cuda::{Arg, CudaDevice, Kernel};
use crate::ops::launch::{self, BLOCK, Defines, kernel_source};
use crate::{Result, Tensor};

kernel_source!("column_parts");

/// By size of a word: 2, 4, 8 and 16 bytes.
pub(crate) const VARIANTS: &[Defines] =
    &[&[("WORD", "unsigned short")], &[("WORD", "u32")], &[("WORD", "u64")], &[("WORD", "uint4")]];

pub(super) fn divide(gpu: &CudaDevice, x: &Tensor, y: &mut Tensor, sections: &Sections) -> Result<()> {
    launch(gpu, "divide_columns", x, y, sections)
}

pub(super) fn join(gpu: &CudaDevice, parts: &Tensor, y: &mut Tensor, sections: &Sections) -> Result<()> {
    launch(gpu, "join_columns", parts, y, sections)
}

fn launch(gpu: &CudaDevice, entry: &'static str, x: &Tensor, y: &mut Tensor, sections: &Sections) -> Result<()> {
    let size = x.dtype().size();
    let fits = |word: usize| {
        let is_aligned = word == size || launch::aligned(&[x, y]);
        is_aligned && sections.widths.iter().all(|width| (width * size).is_multiple_of(word))
    };
    let word = [16, 8, 4, 2].into_iter().find(|&word| word >= size && fits(word)).expect("an element is a word");
    let kernel = Kernel { source: &SOURCE, defines: VARIANTS[word.ilog2() as usize - 1], entry };
    let [q, k, v] = sections.widths.map(|width| Arg::U64((width * size / word) as u64));
    let words = x.bytes() / word;
    let (rows, parts) = (Arg::U64(sections.rows as u64), Arg::I32(sections.parts as i32));
    let args = [Arg::Ptr(y.device_ptr_mut()), Arg::Ptr(x.device_ptr()), rows, parts, q, k, v];
    // SAFETY: both tensors have the elements of `rows` rows of all parts, and their sections begin at words.
    unsafe { gpu.launch(&kernel, launch::elements(gpu, words), BLOCK, 0, &args) }
}
