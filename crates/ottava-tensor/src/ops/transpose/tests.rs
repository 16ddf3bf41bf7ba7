use super::transpose;
use crate::testing::{Tolerance, normals, parity};
use crate::{DType, Device, Tensor};

#[test]
fn transpose_agrees_across_devices() {
    for (rows, columns) in [(1, 1), (3, 7), (33, 31), (65, 128), (257, 100), (144, 272), (128, 384), (256, 128)] {
        for dtype in [DType::F32, DType::BF16, DType::E4M3] {
            let x = normals("transpose", &[rows, columns], DType::F32).read_bytes().unwrap();
            let x =
                Tensor::from_bytes(&Device::Cpu, &[rows, columns], dtype, &x[..rows * columns * dtype.size()]).unwrap();
            parity(&[x], Tolerance::Exact, |x| Ok(vec![transpose(&x[0])?]));
        }
    }
}

#[test]
fn transpose_swaps_rows_and_columns() {
    let x = Tensor::from_slice(&Device::Cpu, &[2, 3], &[1i32, 2, 3, 4, 5, 6]).unwrap();
    let y = transpose(&x).unwrap();
    assert_eq!((y.shape(), y.to_vec::<i32>().unwrap()), ([3, 2].as_slice(), vec![1, 4, 2, 5, 3, 6]));
}
