//! Chooses the format of an export without `--format`.

use super::format::{Convention, Fp8Format, Scheme};
use super::source::Source;
use ottava_common::error::Result;
use ottava_models::Decoder;
use ottava_tensor::Granularity;

impl Fp8Format {
    /// Scales per row of a weight, which linears of all common sizes support.
    const ROWS: Fp8Format = Fp8Format { layout: Convention::CompressedTensors, scheme: Scheme::Dynamic };

    /// One scale per weight and one scale per input.
    const STATIC: Fp8Format = Fp8Format { layout: Convention::CompressedTensors, scheme: Scheme::Static };

    /// E4M3 scales per 16 inputs, and one scale per weight.
    const NVFP4: Fp8Format = Fp8Format { layout: Convention::CompressedTensors, scheme: Scheme::Nvfp4 };

    /// Returns the format for `source`, and the reason. With `static_scales` of inputs, it is the format that stores them. Otherwise, it is the
    /// format whose scales are like the scales of the source's run, so that the codes equal the codes of training. If there is no such format, scales
    /// are per block if all linears have whole blocks, else per row.
    pub fn default_for(source: &Source, static_scales: bool) -> Result<(Fp8Format, String)> {
        if static_scales {
            return Ok((Fp8Format::STATIC, "it stores the scales of inputs".into()));
        }
        source.expect_matrices()?;
        let description = Decoder::describe(&source.sizes, &source.recipe)?;
        let multiple = Fp8Format::FP8_BLOCK.multiple();
        // The first size of a linear that is not a whole number of blocks.
        let mut cut = None;
        let mut whole = 0;
        for (site, _) in &description.linears {
            let mut sizes = vec![(&site.parts[0], "inputs", site.inputs)];
            for part in &site.parts {
                sizes.push((part, "outputs", source.outputs(part)?));
            }
            match sizes.into_iter().find(|(_, _, size)| !size.is_multiple_of(multiple)) {
                Some((name, what, size)) => {
                    cut = cut.or_else(|| Some(format!("{name} has {size} {what}, no multiple of {multiple}")));
                }
                None => whole += 1,
            }
        }
        let of_run = source.recipe.casts.as_ref().and_then(|casts| match casts.weight.granularity {
            Granularity::Blocks128x128 => (whole > 0).then_some(Fp8Format::FP8_BLOCK),
            Granularity::PerRow => Some(Fp8Format::ROWS),
            Granularity::Nvfp4Squares => Some(Fp8Format::NVFP4),
            Granularity::PerTensor => (!source.delayed.is_empty()).then_some(Fp8Format::STATIC),
            // No format has scales of this granularity.
            _ => None,
        });
        Ok(match (of_run, cut) {
            (Some(format), _) => {
                (format, format!("it has the scales of the run's recipe {}", source.recipe.name.as_str()))
            }
            (None, None) => (Fp8Format::FP8_BLOCK, format!("all linears have whole blocks of {multiple}x{multiple}")),
            (None, Some(cut)) => (Fp8Format::ROWS, cut),
        })
    }
}
