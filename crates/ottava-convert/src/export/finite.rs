//! Errors about values that are infinite or NaN.

use ottava_common::error::{Error, Result};

/// Errors with [`Error::NonFinite`], which names the first value that is infinite or NaN.
pub(super) fn expect_finite(name: &str, values: &[f32]) -> Result<()> {
    match values.iter().position(|value| !value.is_finite()) {
        Some(element) => Err(not_finite(name, element, "is not finite")),
        None => Ok(()),
    }
}

/// Returns an error that names the tensor and the element. `what` says what is wrong.
pub(super) fn not_finite(name: &str, element: usize, what: &str) -> Error {
    Error::NonFinite(format!("`{name}`: element {element} {what}, so nothing was exported"))
}
