//! What a server knows of a classifier.

/// The labels of a classifier that is served.
#[derive(Clone, Debug, PartialEq)]
pub struct Classifier {
    /// The names of the labels, in the order of the scores.
    pub names: Vec<String>,
    /// How scores become probabilities.
    pub activation: Activation,
    /// The padding token, at which no scores are read.
    pub padding: Option<u32>,
}

/// How the scores of a text become its probabilities.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// The softmax over all labels: a text has one label.
    Softmax,
    /// The logistic function of each score: a text has any number of labels.
    Sigmoid,
    /// The scores as they are: the numbers of a regression.
    Identity,
}

impl Activation {
    /// Returns the probabilities of the labels of a text with these scores.
    pub fn apply(self, scores: &[f32]) -> Vec<f64> {
        let scores: Vec<f64> = scores.iter().map(|&score| f64::from(score)).collect();
        match self {
            Activation::Identity => scores,
            Activation::Sigmoid => scores.iter().map(|score| 1.0 / (1.0 + (-score).exp())).collect(),
            Activation::Softmax => {
                let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let shares: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
                let sum: f64 = shares.iter().sum();
                shares.into_iter().map(|share| share / sum).collect()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scores_become_probabilities() {
        let near = |found: Vec<f64>, expected: &[f64]| found.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-12);
        assert!(near(Activation::Softmax.apply(&[1000.0, 1000.0]), &[0.5, 0.5]));
        assert!(near(Activation::Sigmoid.apply(&[0.0, 1000.0]), &[0.5, 1.0]));
        assert!(near(Activation::Identity.apply(&[-2.5]), &[-2.5]));
    }
}
