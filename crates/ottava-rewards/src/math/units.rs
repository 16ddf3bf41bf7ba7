//! Words after a number that are dropped.

/// Units that are dropped in every answer. `docs/rewards.md` repeats this list.
const UNITS: &str = "mm cm dm km inch inches foot feet ft yard yards mile miles meter meters metre metres centimeter \
    centimeters centimetres kilometer kilometers kilometres mg kg gram grams kilogram kilograms pound pounds \
    lb lbs ounce ounces ml liter liters litre litres gallon gallons sec second seconds min minute minutes \
    hour hours day days week weeks month months year years mph degree degrees dollar dollars cent cents euro \
    euros unit units square cubic sq per";

/// Units of one letter, which is a variable elsewhere: they are dropped in upright text (`\text{m}`) and in quotients of units (`m/s`).
pub(crate) const LETTERS: &[&str] = &["m", "g", "l", "s", "h"];

/// Units to drop: the list of this file, and the words of a setting.
pub(crate) struct Units<'a>(pub(crate) &'a [String]);

impl Units<'_> {
    pub(crate) fn contain(&self, word: &str) -> bool {
        UNITS.split(' ').any(|unit| unit == word) || self.0.iter().any(|unit| unit == word)
    }
}
