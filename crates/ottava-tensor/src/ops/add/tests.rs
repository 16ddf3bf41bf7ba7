use super::add;
use crate::DType;
use crate::testing::{Tolerance, normals, parity};

#[test]
fn add_agrees_across_devices() {
    for n in [1, 255, 4097, 70_000] {
        for dtype in [DType::F32, DType::BF16] {
            let inputs = [normals("a", &[n], dtype), normals("b", &[n], dtype)];
            parity(&inputs, Tolerance::Exact, |x| Ok(vec![add(&x[0], &x[1])?]));
        }
    }
}
