//! Mutexes whose data stays valid after a thread panics while it holds the lock.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Returns the guard of `mutex`, even after a thread panicked while it held the lock.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
