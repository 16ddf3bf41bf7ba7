//! The scalars of an update for each learning rate: a parameter may multiply the optimizer's learning rate by a factor.

use ottava_common::error::Result;
use ottava_recipe::param::Param;

/// The scalars of an update for each factor of the learning rate, as few as the parameters have factors.
pub(super) struct Rates<S>(Vec<(f64, S)>);

impl<S> Rates<S> {
    /// Creates scalars for the factors of `params`.
    pub fn new(params: &[&mut Param], create: impl Fn() -> Result<S>) -> Result<Rates<S>> {
        let mut factors: Vec<f64> = params.iter().map(|param| param.learning_rate_factor).collect();
        factors.sort_by(f64::total_cmp);
        factors.dedup();
        factors.into_iter().map(|factor| Ok((factor, create()?))).collect::<Result<_>>().map(Rates)
    }

    /// Sets the scalars of each factor with `set`.
    pub fn set(&mut self, mut set: impl FnMut(f64, &mut S) -> Result<()>) -> Result<()> {
        self.0.iter_mut().try_for_each(|(factor, scalars)| set(*factor, scalars))
    }

    /// Returns the factors and their scalars.
    pub fn iter(&self) -> impl Iterator<Item = &(f64, S)> {
        self.0.iter()
    }

    /// Returns the scalars of `param`, which was one of the parameters of [`Rates::new`].
    pub fn of(&self, param: &Param) -> &S {
        let mut rates = self.0.iter();
        &rates.find(|(factor, _)| *factor == param.learning_rate_factor).expect("each factor has scalars").1
    }
}
