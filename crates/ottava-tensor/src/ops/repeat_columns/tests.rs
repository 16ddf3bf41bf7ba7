use super::*;
use crate::testing::{Tolerance, normals, parity, values};
use crate::{DType, Device};

/// Returns sections with three query heads, two key heads and two value heads. Key and value heads are repeated.
fn sections(dim: usize, times: usize) -> [RepeatedColumns; 3] {
    [(3, 1), (2, times), (2, times)].map(|(heads, times)| RepeatedColumns { columns: heads * dim, block: dim, times })
}

#[test]
fn repeat_columns_agrees_across_devices() {
    for (rows, dim, times) in [(1, 1, 1), (5, 8, 2), (33, 16, 4), (0, 8, 2)] {
        let sections = sections(dim, times);
        let [columns, repeated] = [7 * dim, (3 + 4 * times) * dim];
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let inputs = [normals("x", &[rows, columns], dtype), normals("dy", &[rows, repeated], dtype)];
            parity(&inputs, Tolerance::Exact, |t| {
                Ok(vec![repeat_columns(&t[0], &sections)?, repeat_columns_backward(&t[1], &sections)?])
            });
        }
    }
}

#[test]
fn blocks_are_repeated_in_place_and_added() {
    let x = Tensor::from_slice(&Device::Cpu, &[1, 6], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]).unwrap();
    let sections = [(2, 1, 1), (4, 2, 3)].map(|(columns, block, times)| RepeatedColumns { columns, block, times });
    let y = repeat_columns(&x, &sections).unwrap();
    assert_eq!(values(&y), [1., 2., 3., 4., 3., 4., 3., 4., 5., 6., 5., 6., 5., 6.]);
    assert_eq!(values(&repeat_columns_backward(&y, &sections).unwrap()), [1., 2., 9., 12., 15., 18.]);
}

#[test]
fn misfits_are_errors() {
    let x = normals("x", &[2, 14], DType::F32);
    assert!(repeat_columns(&x, &sections(2, 2)).is_ok());
    assert!(repeat_columns(&x, &sections(3, 2)).is_err());
    assert!(repeat_columns(&x, &[RepeatedColumns { columns: 14, block: 4, times: 2 }]).is_err());
    assert!(repeat_columns_backward(&x, &sections(2, 2)).is_err());
}
