use super::IGNORE_INDEX;
use crate::Tensor;
use crate::element::{Float, Real, with_float};

pub(super) fn negate_targets(x: &Tensor, targets: &Tensor, y: &mut Tensor) {
    with_float!(y.dtype(), S => {
        let x: &[<S as Float>::Real] = x.host();
        for (t, (y, &target)) in y.host_mut::<S>().iter_mut().zip(targets.host::<i32>()).enumerate() {
            let of_token = if x.len() == 1 { x[0] } else { x[t] };
            *y = S::store(if target == IGNORE_INDEX { <S as Float>::Real::of(0.0) } else { -of_token });
        }
    });
}
