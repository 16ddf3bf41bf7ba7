//! Rewards of other trainers as tables of `[[reinforcement.rewards]]`.

use toml::{Table, Value};

/// A reward of this type, with further keys.
pub(in crate::import) fn table<const N: usize>(kind: &str, keys: [(&str, Value); N]) -> Table {
    let own = [("type".to_string(), Value::String(kind.into()))];
    own.into_iter().chain(keys.into_iter().map(|(key, value)| (key.to_string(), value))).collect()
}

/// A reward in Python, called `name`, as a program that is still to be written.
pub(super) fn python(name: &str) -> Table {
    let name: String = name.chars().map(|c| if c.is_alphanumeric() || "_-.".contains(c) { c } else { '_' }).collect();
    let command = ["python3".to_string(), format!("{name}.py")].map(Value::String);
    table("command", [("name", Value::String(name)), ("command", Value::Array(command.into()))])
}

/// What is left to do for a reward in Python, which `call` computes.
pub(super) fn how_to_write(name: &str, call: &str) -> String {
    format!(
        "write `{name}.py`: for each line of standard input, {{\"id\", \"samples\": [{{\"prompt\", \"completion\", \"completion_ids\", \"record\"}}]}}, it \
         prints a line {{\"id\", \"rewards\"}} with the result of {call}; docs/rewards.md has the loop of such a program, and `record` has all columns"
    )
}

/// The reward model in this folder.
pub(super) fn model(path: &str) -> Table {
    table("model", [("path", Value::String(path.into()))])
}

/// DAPO's soft punishment of long completions.
pub(super) fn overlong(max_length: u64, buffer: u64, weight: f64) -> Table {
    let mut reward = table(
        "overlong",
        [("max_length", Value::Integer(max_length as i64)), ("buffer", Value::Integer(buffer as i64))],
    );
    if weight != 1.0 {
        reward.insert("weight".into(), weight.into());
    }
    reward
}
