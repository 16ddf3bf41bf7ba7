use super::{rmsnorm, rmsnorm_backward};
use crate::DType;
use crate::testing::{Tolerance, normals, parity, values};

#[test]
fn rmsnorm_agrees_across_devices() {
    for (t, c) in [(1, 1), (3, 7), (5, 257), (129, 1000)] {
        for dtype in [DType::F32, DType::BF16] {
            let inputs = [
                normals("x", &[t, c], dtype),
                normals("w", &[c], dtype),
                normals("dy", &[t, c], dtype),
                normals("s", &[c], DType::F32),
            ];
            // Sums over a row or a column may be added in another order, which can move a rounding by one step.
            let steps = if dtype == DType::F32 { 32.0 } else { 1.0 };
            parity(&inputs, Tolerance::Steps(dtype, steps), |x| {
                let (y, rstd) = rmsnorm(&x[0], &x[1], 1e-6)?;
                let mut dweight = x[3].duplicate()?;
                let dx = rmsnorm_backward(&x[2], &x[0], &x[1], &rstd, &mut dweight)?;
                Ok(vec![y, rstd, dx, dweight])
            });
        }
    }
}

#[test]
fn rows_come_out_with_unit_mean_square() {
    let (x, mut ones) = (normals("x", &[4, 50], DType::F64), normals("w", &[50], DType::F64));
    ones.write_bytes(bytemuck::cast_slice(&[1f64; 50])).unwrap();
    let (y, _) = rmsnorm(&x, &ones, 0.0).unwrap();
    for row in values(&y).chunks(50) {
        let mean_square = row.iter().map(|v| v * v).sum::<f64>() / 50.0;
        assert!((mean_square - 1.0).abs() < 1e-12, "{mean_square}");
    }
}
