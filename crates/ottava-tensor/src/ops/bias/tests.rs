use super::{add_bias, bias_gradient};
use crate::DType;
use crate::testing::{Tolerance, normals, parity, values};

#[test]
fn bias_agrees_across_devices() {
    for (t, c) in [(1, 1), (3, 7), (300, 257), (140, 520)] {
        for dtype in [DType::F32, DType::BF16] {
            let inputs = [normals("x", &[t, c], dtype), normals("bias", &[c], dtype), normals("sum", &[c], DType::F32)];
            parity(&inputs[..2], Tolerance::Exact, |x| {
                let mut y = x[0].duplicate()?;
                add_bias(&mut y, &x[1])?;
                Ok(vec![y])
            });
            // Rows are summed in chunks on the GPU.
            parity(&inputs, Tolerance::Steps(DType::F32, 16.0), |x| {
                let mut sum = x[2].duplicate()?;
                bias_gradient(&x[0], &mut sum)?;
                Ok(vec![sum])
            });
        }
    }
}

#[test]
fn the_gradient_of_a_bias_is_the_sum_of_rows() {
    let (dy, mut sum) = (normals("dy", &[3, 2], DType::F64), normals("sum", &[2], DType::F64));
    let (before, rows) = (values(&sum), values(&dy));
    bias_gradient(&dy, &mut sum).unwrap();
    for c in 0..2 {
        assert_eq!(values(&sum)[c], before[c] + rows[c] + rows[2 + c] + rows[4 + c]);
    }
}
