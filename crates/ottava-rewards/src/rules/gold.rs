//! Right answers, in the records of the data.

use crate::sample::Sample;
use ottava_common::{Error, Result};
use serde_json::Value;
use std::borrow::Cow;

/// The right answers of `sample` in the column `column`: a text, a number, true, false, or a list of these: each is right. A name with dots that is no
/// column is a field of an object: `reward_model.ground_truth` is the field `ground_truth` of the column `reward_model`.
///
/// Errors with [`Error::Data`] if the record has no such column or something else in it.
pub(super) fn golds<'a>(sample: &Sample<'a>, column: &str) -> Result<Vec<Cow<'a, str>>> {
    let place = || format!("the record of {}", sample.place());
    let value = sample.record.get(column).or_else(|| {
        let (column, rest) = column.split_once('.')?;
        rest.split('.').try_fold(sample.record.get(column)?, |object, field| object.get(field))
    });
    let Some(value) = value else {
        let columns: Vec<_> = sample.record.keys().map(String::as_str).collect();
        let columns = columns.join(", ");
        return Err(Error::Data(format!(
            "{} has no column `{column}`; it has: {columns}. Name the column of right answers in `answer`",
            place()
        )));
    };
    let all = match value {
        Value::Array(items) if !items.is_empty() => items.iter().map(text).collect(),
        value => text(value).map(|text| vec![text]),
    };
    let wrong = "holds neither a text, a number or a boolean, nor a list of these";
    all.ok_or_else(|| Error::Data(format!("{}: column `{column}` {wrong}", place())))
}

fn text(value: &Value) -> Option<Cow<'_, str>> {
    match value {
        Value::String(text) => Some(text.into()),
        Value::Number(number) => Some(number.to_string().into()),
        Value::Bool(value) => Some(value.to_string().into()),
        _ => None,
    }
}
