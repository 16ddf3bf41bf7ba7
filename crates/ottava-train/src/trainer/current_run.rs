//! The run of a trainer.

use crate::run::Run;
use std::ops::{Deref, DerefMut};

/// The run of a trainer. It is absent only while it is built anew, since memory has no room for two.
pub struct CurrentRun(Option<Run>);

/// Why there is a run.
const BUILT: &str = "a run is built anew at once";

impl CurrentRun {
    pub(super) fn new(run: Run) -> CurrentRun {
        CurrentRun(Some(run))
    }

    /// Frees the run, before [`CurrentRun::new`] takes another one.
    pub(super) fn free(&mut self) {
        self.0 = None;
    }

    pub(super) fn into_inner(self) -> Run {
        self.0.expect(BUILT)
    }
}

impl Deref for CurrentRun {
    type Target = Run;

    fn deref(&self) -> &Run {
        self.0.as_ref().expect(BUILT)
    }
}

impl DerefMut for CurrentRun {
    fn deref_mut(&mut self) -> &mut Run {
        self.0.as_mut().expect(BUILT)
    }
}
