//! Mutexes whose data stays sound when a holder panics.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// The guard of `mutex`, also after a holder panicked.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
