//! Sentences about values that a setting must not have.

/// Sentences about demands that are not met.
#[derive(Default)]
pub(super) struct Problems(pub(super) Vec<String>);

impl Problems {
    /// Adds `text` unless the demand `holds`.
    pub(super) fn demand(&mut self, holds: bool, text: impl Into<String>) {
        if !holds {
            self.0.push(text.into());
        }
    }

    /// Updates compute in F32: a value that F32 rounds to 0 or to infinity would act as another setting.
    pub(super) fn demand_single(&mut self, key: &str, value: f64) {
        let single = value as f32;
        self.demand(
            value == 0.0 || single.is_normal() || !value.is_finite(),
            format!(
                "`{key}` is {value:e}; steps compute in F32, whose numbers are 0 or lie between {:e} and {:e}",
                f32::MIN_POSITIVE,
                f32::MAX
            ),
        );
    }

    /// Demands a count of at least 1.
    pub(super) fn demand_count(&mut self, key: &str, count: u64) {
        let holds = (1..=1 << 24).contains(&count);
        self.demand(holds, format!("`{key}` is {count}; it is a number from 1 to 16777216"));
    }

    /// Demands a count, such as a number of steps, that may be 0.
    pub(super) fn demand_steps(&mut self, key: &str, count: u64) {
        self.demand(count <= 1 << 40, format!("`{key}` is {count}; it is at most 2^40"));
    }
}

/// Whether a number is finite and not negative.
pub(super) fn from_zero(value: f64) -> bool {
    value.is_finite() && value >= 0.0
}
