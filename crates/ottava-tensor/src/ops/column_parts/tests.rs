use super::{divide_columns, join_columns};
use crate::testing::{Tolerance, normals, parity};
use crate::{DType, Device, Tensor};

#[test]
fn parts_of_columns_agree_across_devices() {
    let cases: [(usize, &[usize], usize); 7] = [
        (1, &[2], 2),
        (5, &[6, 2, 2], 2),
        (33, &[64, 32, 32], 4),
        (7, &[24, 12, 12], 3),
        (256, &[512, 128, 128], 8),
        (4, &[10], 5),
        (3, &[8, 8], 1),
    ];
    for (rows, widths, parts) in cases {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let x = normals("columns", &[rows, widths.iter().sum()], dtype);
            parity(&[x], Tolerance::Exact, |x| {
                let divided = divide_columns(&x[0], widths, parts)?;
                Ok(vec![join_columns(&divided, widths)?, divided])
            });
        }
    }
}

#[test]
fn each_part_has_its_share_of_each_section() {
    let x = Tensor::from_slice(&Device::Cpu, &[2, 8], &(0..16).map(|i| i as f32).collect::<Vec<_>>()).unwrap();
    let parts = divide_columns(&x, &[4, 2, 2], 2).unwrap();
    assert_eq!(parts.shape(), [2, 2, 4]);
    let expected = [0, 1, 4, 6, 8, 9, 12, 14, 2, 3, 5, 7, 10, 11, 13, 15].map(|i| i as f32);
    assert_eq!(parts.to_vec::<f32>().unwrap(), expected);
    assert_eq!(join_columns(&parts, &[4, 2, 2]).unwrap().to_vec::<f32>().unwrap(), x.to_vec::<f32>().unwrap());
}

#[test]
fn uneven_sections_are_an_error() {
    let x = Tensor::zeros(&Device::Cpu, &[2, 8], DType::F32).unwrap();
    let error = divide_columns(&x, &[5, 3], 2).unwrap_err().to_string();
    assert_eq!(error, "divide_columns: 2 parts do not divide sections of [5, 3] columns");
    assert!(divide_columns(&x, &[4], 2).is_err(), "a section of 4 columns is not the matrix");
}
