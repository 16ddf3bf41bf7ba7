use crate::Tensor;
use crate::ops::chunks;
use crate::ops::parameter::UpdatedWeight;
use rayon::prelude::*;

/// The number of elements per task.
const CHUNK: usize = 1 << 14;

pub(super) fn ema(average: &mut Tensor, weight: &mut UpdatedWeight, share: &Tensor, norm: &Tensor) {
    let share = share.host::<f32>()[0];
    if !norm.host::<f32>()[0].is_finite() || share == 0.0 {
        return;
    }
    let pieces = chunks::of_weight(weight, CHUNK).into_par_iter();
    pieces.zip(average.host_mut::<f32>().par_chunks_mut(CHUNK)).for_each(|(piece, average)| {
        let mut weights = vec![0f32; average.len()];
        piece.load(&mut weights);
        for (average, &w) in average.iter_mut().zip(&weights) {
            *average = if share == 1.0 { w } else { *average + share * (w - *average) };
        }
    });
}
