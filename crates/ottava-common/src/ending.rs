//! Tells a thread that works beside a run that the run has ended.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

/// How a run has ended, once it has.
#[derive(Debug)]
pub struct Ending<T> {
    told: Mutex<Option<T>>,
    changed: Condvar,
}

impl<T> Default for Ending<T> {
    fn default() -> Ending<T> {
        Ending { told: Mutex::new(None), changed: Condvar::new() }
    }
}

impl<T: Copy> Ending<T> {
    /// Tells how the run has ended. Only the first call counts.
    pub fn tell(&self, how: T) {
        self.told.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(how);
        self.changed.notify_all();
    }

    /// Returns how the run has ended, if it has.
    pub fn told(&self) -> Option<T> {
        *self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for `time`, or until the run ends. After the end of the run, waits for `after` at most.
    pub fn wait(&self, time: Duration, after: Duration) {
        let told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        let had_ended = told.is_some();
        let time = if had_ended { time.min(after) } else { time };
        drop(self.changed.wait_timeout_while(told, time, |now| now.is_some() == had_ended));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_ending_counts_and_ends_a_wait() {
        let ending = Ending::default();
        assert_eq!(ending.told(), None);
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| ending.wait(Duration::from_secs(3600), Duration::ZERO));
            ending.tell(1);
            waits.join().unwrap();
        });
        ending.tell(2);
        assert_eq!(ending.told(), Some(1));
        ending.wait(Duration::from_secs(3600), Duration::from_millis(1));
    }
}
