//! The labels of records as numbers.

use ottava_settings::ProblemType;
use serde_json::Value;

/// Reads the labels of records.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LabelReader {
    /// The problem of the classifier.
    pub problem: ProblemType,
    /// The names of the labels, in the order of the scores.
    pub names: Vec<String>,
}

impl LabelReader {
    /// Returns a number for each label: 1 for a label that the text has and 0 for another, or the numbers of a regression.
    ///
    /// `label` is the name or the number of a label; for several labels a list of names or numbers, or a list with a number from 0 to 1 for each label; for
    /// a regression a number, or a list of numbers. Numbers may be texts, as in CSV files. Errors with the reason.
    pub fn read(&self, label: &Value) -> Result<Vec<f64>, String> {
        let count = self.names.len();
        let parsed = label.as_str().and_then(|text| match serde_json::from_str(text) {
            Ok(list @ Value::Array(_)) => Some(list),
            _ => None,
        });
        let label = parsed.as_ref().unwrap_or(label);
        match (self.problem, label) {
            (ProblemType::SingleLabelClassification, Value::Array(_)) => {
                Err("field `label` is a list, and a text has one label; set `classification.problem_type` = \
                     \"multi_label_classification\" for several"
                    .into())
            }
            (ProblemType::SingleLabelClassification, one) => self.marked([self.place(one)?]),
            (ProblemType::MultiLabelClassification, Value::Array(all)) => match shares(all, count) {
                Some(shares) => Ok(shares),
                None => self.marked(all.iter().map(|one| self.place(one)).collect::<Result<Vec<_>, _>>()?),
            },
            // The only label of a reranker.
            (ProblemType::MultiLabelClassification, one) if count == 1 && share(one).is_some() => {
                Ok(share(one).into_iter().collect())
            }
            (ProblemType::MultiLabelClassification, one) => self.marked([self.place(one)?]),
            (ProblemType::Regression, Value::Array(all)) if all.len() == count => {
                all.iter().map(|one| number(one).ok_or_else(|| not_a_number(one))).collect()
            }
            (ProblemType::Regression, one) if count == 1 => Ok(vec![number(one).ok_or_else(|| not_a_number(one))?]),
            (ProblemType::Regression, other) => {
                Err(format!("field `label` is {other}, and the regression has {count} numbers; write a list of them"))
            }
        }
    }

    /// Returns the place of a label that is given by name or by number.
    fn place(&self, label: &Value) -> Result<usize, String> {
        let named = label.as_str().and_then(|name| self.names.iter().position(|known| known == name));
        let numbered = || {
            let number = number(label).or(label.as_bool().map(|label| f64::from(u8::from(label))))?;
            (number >= 0.0 && number.fract() == 0.0 && number < self.names.len() as f64).then_some(number as usize)
        };
        named.or_else(numbered).ok_or_else(|| {
            let (most, shown) = (8, self.names.iter().take(8).cloned().collect::<Vec<_>>().join(", "));
            let more = if self.names.len() > most { ", ..." } else { "" };
            format!(
                "field `label` has {label}, which is no label of the {} labels ({shown}{more}) and no number below {}; correct the record, or set \
                 `classification.label_names`",
                self.names.len(),
                self.names.len()
            )
        })
    }

    fn marked(&self, places: impl IntoIterator<Item = usize>) -> Result<Vec<f64>, String> {
        let mut marks = vec![0.0; self.names.len()];
        places.into_iter().for_each(|place| marks[place] = 1.0);
        Ok(marks)
    }
}

/// Returns a finite number, which may be a text.
fn number(value: &Value) -> Option<f64> {
    let number = value.as_f64().or_else(|| value.as_str()?.trim().parse().ok());
    number.filter(|number| number.is_finite())
}

/// Returns a number from 0 to 1, or a truth value.
fn share(value: &Value) -> Option<f64> {
    let share = number(value).or(value.as_bool().map(|is_true| f64::from(u8::from(is_true))));
    share.filter(|share| (0.0..=1.0).contains(share))
}

/// Returns a number from 0 to 1 for each of `count` labels, if `list` has as many.
fn shares(list: &[Value], count: usize) -> Option<Vec<f64>> {
    if list.len() != count {
        return None;
    }
    list.iter().map(share).collect()
}

fn not_a_number(value: &Value) -> String {
    format!("field `label` has {value}, and the label of a regression is a number")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn labels_are_names_numbers_lists_and_shares() {
        use ProblemType::{MultiLabelClassification as Multi, Regression, SingleLabelClassification as Single};
        let names = |count: usize| ["no", "yes", "7"].map(str::to_string)[..count].to_vec();
        let read = |problem, count, label| LabelReader { problem, names: names(count) }.read(&label);
        for (problem, count, label, expected) in [
            (Single, 2, json!(1), vec![0.0, 1.0]),
            (Single, 2, json!("no"), vec![1.0, 0.0]),
            (Single, 2, json!("1"), vec![0.0, 1.0]),
            (Single, 3, json!("7"), vec![0.0, 0.0, 1.0]),
            (Single, 2, json!(true), vec![0.0, 1.0]),
            (Multi, 3, json!([0, 2]), vec![1.0, 0.0, 1.0]),
            (Multi, 3, json!(["yes"]), vec![0.0, 1.0, 0.0]),
            (Multi, 3, json!([]), vec![0.0, 0.0, 0.0]),
            (Multi, 3, json!([0, 1, 0.5]), vec![0.0, 1.0, 0.5]),
            (Multi, 3, json!([false, true, true]), vec![0.0, 1.0, 1.0]),
            (Multi, 3, json!("[\"no\", \"7\"]"), vec![1.0, 0.0, 1.0]),
            (Multi, 1, json!(0.25), vec![0.25]),
            (Multi, 3, json!(2), vec![0.0, 0.0, 1.0]),
            (Regression, 1, json!(1.5), vec![1.5]),
            (Regression, 1, json!("-2"), vec![-2.0]),
            (Regression, 2, json!([1, 2.5]), vec![1.0, 2.5]),
        ] {
            assert_eq!(read(problem, count, label.clone()), Ok(expected), "{problem:?} {label}");
        }
        for (problem, count, label, words) in [
            (Single, 2, json!(2), "no label of the 2 labels (no, yes)"),
            (Single, 2, json!("maybe"), "no label of the 2 labels"),
            (Single, 2, json!(0.5), "no label of the 2 labels"),
            (Single, 2, json!([1]), "multi_label_classification"),
            (Multi, 3, json!([0, 3]), "no label of the 3 labels"),
            (Regression, 1, json!("x"), "is a number"),
            (Regression, 2, json!(1.0), "has 2 numbers"),
        ] {
            let error = read(problem, count, label.clone()).unwrap_err();
            assert!(error.contains(words), "{label}: {error}");
        }
    }
}
