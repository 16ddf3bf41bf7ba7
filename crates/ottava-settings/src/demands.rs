//! Collects sentences about settings with values that are not allowed.

/// Sentences about settings whose values are not allowed.
#[derive(Default)]
pub(super) struct Problems(pub(super) Vec<String>);

impl Problems {
    /// Adds the sentence `text` if the demand does not hold.
    pub(super) fn demand(&mut self, holds: bool, text: impl Into<String>) {
        if !holds {
            self.0.push(text.into());
        }
    }

    /// Demands a number that F32 does not round to 0 or to infinity. Updates compute in F32, where a rounded value would act like another setting.
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

    /// Demands a count from 1 to 2^24.
    pub(super) fn demand_count(&mut self, key: &str, count: u64) {
        let holds = (1..=1 << 24).contains(&count);
        self.demand(holds, format!("`{key}` is {count}; it is a number from 1 to 16777216"));
    }

    /// Demands a count from 0 to 2^40, such as a number of steps.
    pub(super) fn demand_steps(&mut self, key: &str, count: u64) {
        self.demand(count <= 1 << 40, format!("`{key}` is {count}; it is at most 2^40"));
    }
}

/// Whether a number is finite and not negative.
pub(super) fn from_zero(value: f64) -> bool {
    value.is_finite() && value >= 0.0
}
