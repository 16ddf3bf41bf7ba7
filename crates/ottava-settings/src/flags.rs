//! Flags of the command line that are settings of Ottava or of other trainers.

use crate::names::{self, Known};
use crate::old_keys;
use crate::words::{self, Translation};
use toml::{Table, Value};

/// Returns what to write instead of the flag `--name value`, if the flag is a setting. A flag without a value has the value `true`.
pub fn describe_flag(name: &str, value: Option<&str>) -> Option<String> {
    let name = name.trim_start_matches('-').replace('-', "_");
    let value = match value {
        None => Value::Boolean(true),
        Some(text) => {
            let read = format!("value = {text}").parse::<Table>().ok().and_then(|mut table| table.remove("value"));
            read.unwrap_or_else(|| Value::String(text.to_string()))
        }
    };
    let set = |path: &str, value: &Value| {
        let short = value.as_str().map_or_else(|| value.to_string(), str::to_string);
        let shell = match short.contains([' ', '[', '"']) {
            true => format!("'{path}={short}'"),
            false => format!("{path}={short}"),
        };
        format!("write `--set {shell}`, or {} in the run's file", names::line(path, value))
    };
    match words::translate(&name, &value) {
        Some(Translation::Ours(path, value)) => return Some(set(path, &value)),
        Some(Translation::Nothing | Translation::Without(..)) => {
            return Some("leave it out: Ottava does so without it".into());
        }
        Some(Translation::Refused(reason) | Translation::Needless(reason)) => return Some(reason.to_string()),
        None => {}
    }
    if let Some(old) = old_keys::find(&name) {
        return Some(set(old.new, &old.value_now(&value)));
    }
    let known = Known::new();
    let path = known.0.iter().find(|path| **path == name || path.rsplit('.').next() == Some(&name))?;
    Some(set(path, &value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_of_other_trainers_are_answered_with_our_setting() {
        let says = |name: &str, value: Option<&str>| describe_flag(name, value).unwrap_or_default();
        let expected = "write `--set optimizer.learning_rate=1e-4`, or `learning_rate = 0.0001` under [optimizer] in the run's file";
        assert_eq!(says("--lr", Some("1e-4")).replace("=0.0001`", "=1e-4`"), expected);
        assert!(says("--bf16", None).starts_with("write `--set precision.recipe=bf16`"));
        assert!(says("--tensor-model-parallel-size", Some("2")).contains("`--set parallel.tensor=2`"));
        assert!(says("--fp8-format", Some("hybrid")).contains("`--set precision.fp8_format=hybrid`"));
        assert!(
            says("--override-linear-precision", Some("[false, false, true]"))
                .contains("'precision.exceptions.high_precision_products=[\"wgrad\"]'")
        );
        assert!(says("--max_steps", Some("9")).contains("`--set training.max_steps=9`"));
        assert!(says("--deepspeed", Some("ds.json")).contains("`ottava import`"));
        assert!(says("--use_cpu", None).contains("`device = \"cpu\"` at the top of the file"));
        assert_eq!(describe_flag("--purple", None), None);
    }
}
