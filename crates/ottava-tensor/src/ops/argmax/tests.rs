use super::*;
use crate::Device;
use crate::testing::{Tolerance, normals, parity};

#[test]
fn argmax_agrees_across_devices() {
    for (rows, columns) in [(1, 1), (3, 7), (5, 1024), (2, 5000)] {
        let mut x = normals("x", &[rows, columns], DType::F32);
        if columns == 5000 {
            x.copy_from(0, &Tensor::zeros(&Device::Cpu, &[1, columns], DType::F32).unwrap()).unwrap();
        }
        parity(&[x], Tolerance::Exact, |x| Ok(vec![argmax(&x[0])?]));
    }
}

#[test]
fn the_first_of_equals_is_the_largest_and_rows_that_are_not_finite_have_none() {
    let mut many = vec![-2.0; 21];
    (many[13], many[19]) = (5.0, 5.0);
    let rows = [
        (vec![1.0, 3.0, 3.0], 1),
        (vec![-0.0, 0.0], 0),
        (many.clone(), 13),
        (vec![1.0, f32::NAN, 3.0], -1),
        ([many.as_slice(), &[f32::INFINITY]].concat(), -1),
        (vec![f32::NEG_INFINITY, 3.0], -1),
        (vec![f32::MIN, f32::MAX], 1),
    ];
    for (row, expected) in rows {
        let x = Tensor::from_slice(&Device::Cpu, &[1, row.len()], &row).unwrap();
        assert_eq!(argmax(&x).unwrap().to_vec::<i32>().unwrap(), [expected], "{row:?}");
        parity(&[x], Tolerance::Exact, |x| Ok(vec![argmax(&x[0])?]));
    }
}
