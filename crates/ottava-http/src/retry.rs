//! Repeats a request after a temporary failure.

use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

/// The maximum pause between two attempts, even if a server asks for a longer pause.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// The reason why an attempt failed.
#[derive(Debug)]
pub struct Fault {
    /// A sentence without a full stop that says what happened, and where.
    pub words: String,
    /// Whether another attempt may succeed.
    pub may_pass: bool,
    /// The pause that the server asks for (`Retry-After`).
    pub pause: Option<Duration>,
    /// The status of the server's answer; `None` if there was no answer.
    pub status: Option<u16>,
}

impl Fault {
    /// Creates a temporary fault: another attempt may succeed.
    pub fn passing(words: impl Into<String>) -> Fault {
        Fault { words: words.into(), may_pass: true, pause: None, status: None }
    }

    /// Creates a permanent fault: every attempt would fail.
    pub fn lasting(words: impl Into<String>) -> Fault {
        Fault { words: words.into(), may_pass: false, pause: None, status: None }
    }
}

/// The number of attempts, and the pauses between them.
#[derive(Clone, Copy, Debug)]
pub struct Retry {
    /// The maximum number of attempts; at least one attempt is made.
    pub attempts: u32,
    /// The pause before the second attempt. It doubles before each later attempt, and is shortened by a random part of up to half.
    pub first_pause: Duration,
}

impl Retry {
    /// Runs `attempt` until it succeeds, fails permanently, or no attempts are left. `wait` pauses; if it returns `false`, no further attempt is
    /// made.
    ///
    /// Errors with the last fault, which then also says how many attempts were made.
    pub fn run<T>(
        &self,
        mut wait: impl FnMut(Duration) -> bool,
        mut attempt: impl FnMut() -> Result<T, Fault>,
    ) -> Result<T, Fault> {
        let mut made = 1;
        loop {
            let fault = match attempt() {
                Ok(value) => return Ok(value),
                Err(fault) => fault,
            };
            if !fault.may_pass || made >= self.attempts || !wait(self.pause(made, fault.pause)) {
                let attempts = if made > 1 { format!(" (after {made} attempts)") } else { String::new() };
                return Err(Fault { words: fault.words + &attempts, ..fault });
            }
            made += 1;
        }
    }

    /// Returns the pause after attempt number `made`, counted from 1.
    fn pause(&self, made: u32, asked: Option<Duration>) -> Duration {
        let doubled = self.first_pause.saturating_mul(1 << (made - 1).min(16));
        let share = (RandomState::new().hash_one(made) % 1000) as f64 / 2000.0;
        asked.unwrap_or(doubled.mul_f64(1.0 - share)).min(LONGEST_PAUSE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pauses(attempts: u32, fault: fn() -> Fault) -> (Vec<Duration>, String) {
        let retry = Retry { attempts, first_pause: Duration::from_millis(100) };
        let mut pauses = Vec::new();
        let fault = retry
            .run(
                |pause| {
                    pauses.push(pause);
                    true
                },
                || Err::<(), _>(fault()),
            )
            .unwrap_err();
        (pauses, fault.words)
    }

    #[test]
    fn pauses_double_within_their_bounds() {
        let (pauses, words) = pauses(4, || Fault::passing("status 503"));
        assert_eq!(words, "status 503 (after 4 attempts)");
        assert_eq!(pauses.len(), 3);
        for (pause, whole) in pauses.iter().zip([100, 200, 400]) {
            let whole = Duration::from_millis(whole);
            assert!((whole / 2..=whole).contains(pause), "{pause:?} of {whole:?}");
        }
    }

    #[test]
    fn lasting_faults_end_at_once_and_servers_choose_the_pause_up_to_a_minute() {
        assert_eq!(pauses(4, || Fault::lasting("status 404")), (Vec::new(), "status 404".into()));
        let asked = || Fault { pause: Some(Duration::from_secs(3600)), ..Fault::passing("status 429") };
        assert_eq!(pauses(2, asked).0, [LONGEST_PAUSE]);
    }
}
