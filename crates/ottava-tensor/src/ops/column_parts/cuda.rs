use super::Sections;
use crate::cuda::{CudaDevice, Entry};
use crate::ops::declaration::kernels;
use crate::ops::launch::{self, BLOCK, Defines};
use crate::{Result, Tensor};

kernels! {
    static SOURCE = { file: "column_parts", variants: VARIANTS };
    kernel divide_columns, join_columns(y: *mut WORD, x: *const WORD, rows: u64, parts: i32, a: u64, b: u64, c: u64);
}

/// The variants by size of a word: 2, 4, 8 and 16 bytes.
const VARIANTS: &[Defines] =
    &[&[("WORD", "unsigned short")], &[("WORD", "u32")], &[("WORD", "u64")], &[("WORD", "uint4")]];

pub(super) fn divide(gpu: &CudaDevice, x: &Tensor, y: &mut Tensor, sections: &Sections) -> Result<()> {
    let word = word(x, y, sections);
    let [q, k, v] = word.of_sections;
    launch(gpu, word, kernel::divide_columns(y, x, sections.rows, sections.parts, q, k, v))
}

pub(super) fn join(gpu: &CudaDevice, parts: &Tensor, y: &mut Tensor, sections: &Sections) -> Result<()> {
    let word = word(parts, y, sections);
    let [q, k, v] = word.of_sections;
    launch(gpu, word, kernel::join_columns(y, parts, sections.rows, sections.parts, q, k, v))
}

/// The words that a launch copies.
struct Word {
    bytes: usize,
    /// The number of words per row of each section of a part.
    of_sections: [usize; 3],
    all: usize,
}

fn word(x: &Tensor, y: &Tensor, sections: &Sections) -> Word {
    let size = x.dtype().size();
    let fits = |word: usize| {
        let is_aligned = word == size || launch::aligned(&[x, y]);
        is_aligned && sections.widths.iter().all(|width| (width * size).is_multiple_of(word))
    };
    let bytes = [16, 8, 4, 2].into_iter().find(|&word| word >= size && fits(word)).expect("an element is a word");
    Word { bytes, of_sections: sections.widths.map(|width| width * size / bytes), all: x.bytes() / bytes }
}

fn launch(gpu: &CudaDevice, word: Word, entry: Entry) -> Result<()> {
    let kernel = SOURCE.kernel(VARIANTS[word.bytes.ilog2() as usize - 1], entry);
    // SAFETY: both tensors have the elements of `rows` rows of all parts. Their sections begin at multiples of a word.
    unsafe { gpu.launch(&kernel, launch::elements(gpu, word.all), BLOCK, 0) }
}
