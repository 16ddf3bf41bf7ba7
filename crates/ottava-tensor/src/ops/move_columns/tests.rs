use super::{ColumnRuns, move_columns, sum_columns};
use crate::testing::{Tolerance, normals, parity};
use crate::{DType, Device, Tensor};

#[test]
fn moves_of_columns_agree_across_devices() {
    // With the factor 8, runs consist of 16-byte words.
    for (rows, count, width, of) in [(1, 1, 1, 1), (5, 3, 7, 1), (33, 16, 64, 1), (33, 16, 64, 8), (1, 1, 8, 8)] {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let inputs = [
                normals("from", &[rows, 3 * of + count * (width + 2 * of)], dtype),
                normals("to", &[rows, 2 * of + count * (width + 5 * of)], dtype),
            ];
            // Both devices sum in the same order.
            parity(&inputs, Tolerance::Exact, |x| {
                let [from, to] =
                    [(3, 2), (1, 5)].map(|(first, gap)| ColumnRuns { first: first * of, step: width + gap * of });
                let mut moved = x[1].duplicate()?;
                move_columns(&x[0], from, &mut moved, to, count, width)?;
                let mut copied = x[1].duplicate()?;
                move_columns(&x[0], ColumnRuns { first: of, step: 0 }, &mut copied, to, count, width)?;
                let sums = sum_columns(&x[0], from, count, width)?;
                Ok(vec![moved, copied, sums])
            });
        }
    }
}

#[test]
fn runs_are_moved_and_summed_by_their_columns() {
    let from = Tensor::from_slice(&Device::Cpu, &[2, 4], &[1f32, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]).unwrap();
    let mut to = Tensor::zeros(&Device::Cpu, &[2, 5], DType::F32).unwrap();
    move_columns(&from, ColumnRuns { first: 0, step: 2 }, &mut to, ColumnRuns { first: 1, step: 3 }, 2, 1).unwrap();
    assert_eq!(to.to_vec::<f32>().unwrap(), [0.0, 1.0, 0.0, 0.0, 3.0, 0.0, 5.0, 0.0, 0.0, 7.0]);
    let sums = sum_columns(&from, ColumnRuns { first: 1, step: 1 }, 2, 2).unwrap();
    assert_eq!(sums.to_vec::<f32>().unwrap(), [5.0, 7.0, 13.0, 15.0]);
    let error = move_columns(&from, ColumnRuns { first: 3, step: 0 }, &mut to, ColumnRuns { first: 0, step: 2 }, 2, 2);
    assert_eq!(error.unwrap_err().to_string(), "move_columns: from: 2 runs of 2 columns end at 5 of 4");
    let error = move_columns(&from, ColumnRuns { first: 0, step: 0 }, &mut to, ColumnRuns { first: 0, step: 1 }, 2, 2);
    assert!(error.unwrap_err().to_string().contains("overlap"));
}
