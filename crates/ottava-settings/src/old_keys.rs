//! Keys of earlier versions, and the current keys that replace them. Files, command lines and the settings of saved runs may have old keys.

use crate::keys;
use crate::pairs::{self, Kind};
use crate::paths::{self, insert};
use toml::{Table, Value};

/// A key that has moved, or with values that are written differently now.
pub(super) struct OldKey {
    /// The old path of the key.
    pub old: &'static str,
    /// The current path of the key.
    pub new: &'static str,
    /// Old values with their current values, as TOML; an empty text leaves the key out. If the key has not moved, only these values are
    /// old.
    values: &'static [(&'static str, &'static str)],
    only: Option<Only>,
    /// The current value for an old value that is written in another way.
    convert: Option<fn(&Value) -> Option<Value>>,
}

/// The variants that read a key. Earlier versions accepted the key in any file.
struct Only {
    /// The path of the key that chooses the variant.
    tag: &'static str,
    names: &'static [&'static str],
    /// The value of the key in a saved run that did not set it, as TOML.
    default: &'static str,
}

/// What becomes of an old key of a table.
pub(super) struct Change {
    /// The old path.
    pub old: &'static str,
    /// The value at the old path.
    pub was: Value,
    /// What replaces it.
    pub now: Now,
}

/// What replaces an old key.
pub(super) enum Now {
    /// The new path and value.
    Is(&'static str, Value),
    /// Nothing: a file without the key means the same.
    Nothing,
    /// Nothing: the run does not read the key, for this reason.
    Unread(String),
}

impl Change {
    /// What becomes of the key, for the log.
    pub(super) fn told(&self) -> String {
        let Change { old, was, now } = self;
        match now {
            Now::Is(new, value) if value == was => format!("`{old}` is `{new}`"),
            Now::Is(new, value) => format!("`{old} = {was}` is `{new} = {value}`"),
            Now::Nothing => format!("`{old} = {was}` is left out"),
            Now::Unread(reason) => format!("`{old} = {was}` has no effect and is left out: it {reason}"),
        }
    }
}

const fn moved(old: &'static str, new: &'static str) -> OldKey {
    OldKey { old, new, values: &[], only: None, convert: None }
}

impl OldKey {
    const fn values(self, values: &'static [(&'static str, &'static str)]) -> OldKey {
        OldKey { values, ..self }
    }

    const fn only(self, tag: &'static str, names: &'static [&'static str], default: &'static str) -> OldKey {
        OldKey { only: Some(Only { tag, names, default }), ..self }
    }

    const fn converted(self, convert: fn(&Value) -> Option<Value>) -> OldKey {
        OldKey { convert: Some(convert), ..self }
    }

    /// Whether the key moved.
    fn has_moved(&self) -> bool {
        self.old != self.new
    }

    /// The value at the new path that replaces `was`.
    pub(super) fn value_now(&self, was: &Value) -> Value {
        let listed = self.values.iter().find(|(old, new)| is(was, old) && !new.is_empty());
        listed.map_or_else(|| was.clone(), |(_, new)| value(new))
    }

    /// What replaces the key with the value `was`, in a table where `variant` names the variant of a tag.
    fn now<'a>(&self, was: &Value, variant: impl Fn(&str) -> Option<&'a str>) -> Option<Now> {
        if let Some(Only { tag, names, default }) = &self.only {
            let name = variant(tag).unwrap_or_default();
            if !names.contains(&name) {
                return Some(match is(was, default) {
                    true => Now::Nothing,
                    false => Now::Unread(format!("is for {}, and `{tag}` is {name}", names.join(" and "))),
                });
            }
        }
        if let Some(value) = self.convert.and_then(|convert| convert(was)) {
            return Some(Now::Is(self.new, value));
        }
        match self.values.iter().find(|(old, _)| is(was, old)) {
            Some((_, "")) => Some(Now::Nothing),
            Some((_, new)) => Some(Now::Is(self.new, value(new))),
            None => self.has_moved().then(|| Now::Is(self.new, was.clone())),
        }
    }
}

const OPTIMIZER: &str = "optimizer.name";
const SCHEDULE: &str = "lr_scheduler.type";
const ADAMW: &[&str] = &["adamw", "muon"];
const DECAYS: &[&str] = &["cosine", "linear", "warmup_stable_decay", "cosine_with_restarts", "polynomial"];
const END: &[(&str, &str)] = &[("0", "\"end\"")];
const STORAGES: &[(&str, &str)] = &[
    ("\"O0\"", "\"float32\""),
    ("\"O1\"", "\"msamp-o1\""),
    ("\"O2\"", "\"msamp-o2\""),
    ("\"O3\"", "\"msamp-o3\""),
    ("\"bf16\"", "\"bfloat16\""),
];
/// In earlier versions, a share of the steps replaced the number of steps unless the share was 0. A share of 1 becomes the largest share
/// below 1.
const SHARES: &[(&str, &str)] = &[("0.0", ""), ("1.0", "0.9999999999999999")];

fn texts(list: &Value) -> Option<Value> {
    pairs::table(list, Kind::Texts)
}

fn json(list: &Value) -> Option<Value> {
    pairs::table(list, Kind::Json)
}

fn numbers(list: &Value) -> Option<Value> {
    pairs::table(list, Kind::Numbers)
}

/// Names of fields and roles in the data sets of a list.
fn names_of_sets(list: &Value) -> Option<Value> {
    let mut sets = list.clone();
    let tables = sets.as_array_mut()?.iter_mut().filter_map(Value::as_table_mut);
    let names = tables.flat_map(|set| set.iter_mut()).filter(|(key, _)| ["fields", "roles"].contains(&key.as_str()));
    for (_, value) in names {
        *value = texts(value).unwrap_or_else(|| value.clone());
    }
    (sets != *list).then_some(sets)
}

/// All old keys. If several old keys have become one key, the first of them that is not left out counts.
const OLD: &[OldKey] = &[
    moved("training.max_steps", "training.max_steps").values(&[("0", "")]),
    moved("training.global_batch_size", "training.global_batch_size").values(&[("0", "")]),
    moved("evaluation.eval_steps", "evaluation.eval_steps").values(END),
    moved("checkpoint.save_steps", "checkpoint.save_steps").values(END),
    moved("training.learning_rate", "optimizer.learning_rate"),
    moved("training.weight_decay", "optimizer.weight_decay"),
    moved("optimizer.level", "optimizer.storage").values(STORAGES),
    moved("optimizer.storage", "optimizer.storage").values(STORAGES),
    moved("training.adam_beta1", "optimizer.beta1").only(OPTIMIZER, ADAMW, "0.9"),
    moved("training.adam_beta2", "optimizer.beta2").only(OPTIMIZER, ADAMW, "0.95"),
    moved("training.adam_epsilon", "optimizer.eps").only(OPTIMIZER, ADAMW, "1e-8"),
    moved("training.muon_momentum", "optimizer.momentum").only(OPTIMIZER, &["muon"], "0.95"),
    moved("training.muon_adjust_lr_fn", "optimizer.adjust_lr_fn").only(OPTIMIZER, &["muon"], "\"match_rms_adamw\""),
    moved("training.lion_beta1", "optimizer.beta1").only(OPTIMIZER, &["lion"], "0.9"),
    moved("training.lion_beta2", "optimizer.beta2").only(OPTIMIZER, &["lion"], "0.99"),
    moved("training.lr_scheduler_type", SCHEDULE),
    moved("training.warmup_ratio", "lr_scheduler.warmup_steps").values(SHARES),
    moved("training.warmup_steps", "lr_scheduler.warmup_steps"),
    moved("training.min_learning_rate", "lr_scheduler.min_learning_rate").only(SCHEDULE, DECAYS, "0.0"),
    moved("training.decay_steps", "lr_scheduler.decay_steps").only(SCHEDULE, &["warmup_stable_decay"], "0"),
    moved("training.lr_num_cycles", "lr_scheduler.num_cycles").only(SCHEDULE, &["cosine_with_restarts"], "1"),
    moved("training.lr_power", "lr_scheduler.power").only(SCHEDULE, &["polynomial"], "1.0"),
    moved("training.eval_steps", "evaluation.eval_steps").values(END),
    moved("training.load_best_model_at_end", "evaluation.load_best_model_at_end"),
    moved("training.metric_for_best_model", "evaluation.metric_for_best_model"),
    moved("training.early_stopping_patience", "evaluation.early_stopping_patience"),
    moved("training.early_stopping_threshold", "evaluation.early_stopping_threshold"),
    moved("training.save_steps", "checkpoint.save_steps").values(END),
    moved("training.save_total_limit", "checkpoint.save_total_limit"),
    moved("training.async_save", "checkpoint.async_save"),
    moved("precision.amax_history_len", "precision.delayed.amax_history_len"),
    moved("precision.amax_compute_algo", "precision.delayed.amax_compute_algo"),
    moved("precision.margin", "precision.delayed.margin"),
    moved("precision.interval", "precision.delayed.interval"),
    moved("precision.non_finite", "precision.delayed.non_finite"),
    moved("precision.first_step", "precision.delayed.first_step"),
    moved("precision.initial_loss_scale", "precision.fp16.initial_loss_scale"),
    moved("precision.loss_scale_window", "precision.fp16.loss_scale_window"),
    moved("precision.min_loss_scale", "precision.fp16.min_loss_scale"),
    moved("alarms.spike_window", "alarms.spikes.spike_window"),
    moved("alarms.spike_threshold", "alarms.spikes.spike_threshold"),
    moved("alarms.rollback_steps", "alarms.rollback.rollback_steps"),
    moved("alarms.max_rollbacks", "alarms.rollback.max_rollbacks"),
    moved("alarms.saturated_share", "alarms.cast_bounds.saturated_share"),
    moved("alarms.underflowed_share", "alarms.cast_bounds.underflowed_share"),
    moved("alarms.amax_growth", "alarms.cast_bounds.amax_growth"),
    moved("precision.high_precision_products", "precision.exceptions.high_precision_products"),
    moved("precision.high_precision_steps", "precision.exceptions.high_precision_steps"),
    moved("precision.high_precision_layers", "precision.exceptions.high_precision_layers"),
    moved("precision.first_layers_bf16", "precision.exceptions.first_layers_bf16"),
    moved("precision.last_layers_bf16", "precision.exceptions.last_layers_bf16"),
    moved("precision.skip_slow_linears", "precision.exceptions.skip_slow_linears"),
    moved("precision.fprop_accumulation", "precision.accumulation.fprop_accumulation"),
    moved("precision.dgrad_accumulation", "precision.accumulation.dgrad_accumulation"),
    moved("precision.wgrad_accumulation", "precision.accumulation.wgrad_accumulation"),
    moved("data.text_documents", "data.records.text_documents"),
    moved("data.text_field", "data.records.text_field"),
    moved("data.formatting", "data.records.formatting"),
    moved("data.fields", "data.records.fields").converted(texts),
    moved("data.roles", "data.records.roles").converted(texts),
    moved("data.records.fields", "data.records.fields").converted(texts),
    moved("data.records.roles", "data.records.roles").converted(texts),
    moved("data.ignored_fields", "data.records.ignored_fields"),
    moved("data.on_bad_record", "data.records.on_bad_record"),
    moved("data.max_bad_records", "data.records.max_bad_records"),
    moved("data.roles_to_train", "data.chat.roles_to_train"),
    moved("data.train_on_eos", "data.chat.train_on_eos"),
    moved("data.chat_template_path", "data.chat.chat_template_path"),
    moved("data.chat_template_kwargs", "data.chat.chat_template_kwargs").converted(json),
    moved("data.chat.chat_template_kwargs", "data.chat.chat_template_kwargs").converted(json),
    moved("parallel.reduce_dtype", "parallel.communication.reduce_dtype"),
    moved("parallel.activation_dtype", "parallel.communication.activation_dtype"),
    moved("parallel.error_feedback", "parallel.communication.error_feedback"),
    moved("parallel.join_timeout", "parallel.communication.join_timeout"),
    moved("parallel.silence_timeout", "parallel.communication.silence_timeout"),
    moved("parallel.collective_timeout", "parallel.communication.collective_timeout"),
    moved("data.datasets", "data.datasets").converted(names_of_sets),
    moved("lora.rank_pattern", "lora.rank_pattern").converted(numbers),
    moved("lora.alpha_pattern", "lora.alpha_pattern").converted(numbers),
    moved("reinforcement.temperature", "reinforcement.sampling.temperature"),
    moved("reinforcement.dynamic_sampling", "reinforcement.sampling.dynamic_sampling"),
    moved("reinforcement.max_rounds", "reinforcement.sampling.max_rounds"),
    moved("reinforcement.kv_cache_tokens", "reinforcement.sampling.kv_cache_tokens"),
    moved("training.logging_steps", "logging.logging_steps"),
    moved("training.cast_statistics_steps", "logging.cast_statistics_steps"),
];

/// The value for a file that `value` on a command line means, if files write the values of the key at `path` in another way.
pub(super) fn converted(path: &str, value: &Value) -> Option<Value> {
    OLD.iter().find(|key| key.new == path)?.convert.and_then(|convert| convert(value))
}

/// The key that moved from `name`: its old path, or the last part of its old path if no current key has this name.
pub(super) fn find(name: &str) -> Option<&'static OldKey> {
    let last = |path: &str| path.rsplit('.').next() == Some(name);
    let is_new = keys::all().iter().any(|key| last(&key.path));
    OLD.iter().filter(|key| key.has_moved()).find(|key| key.old == name || !is_new && last(key.old))
}

/// The name of the variant that the key at the path `tag` chooses in `table`, there or at its old path.
fn variant<'a>(table: &'a Table, tag: &str) -> Option<&'a str> {
    let old = OLD.iter().filter(|key| key.new == tag).find_map(|key| paths::get(table, key.old)?.as_str());
    old.or_else(|| keys::variant(table, tag))
}

/// The old keys of `table`, and what replaces them.
pub(super) fn changes(table: &Table) -> Vec<Change> {
    let mut changes: Vec<Change> = Vec::new();
    for key in OLD {
        let Some(was) = paths::get(table, key.old).cloned() else { continue };
        let Some(mut now) = key.now(&was, |tag| variant(table, tag)) else { continue };
        let replaced =
            |change: &Change| matches!(change.now, Now::Is(path, _) if path == key.new).then_some(change.old);
        if let (Now::Is(..), Some(other)) = (&now, changes.iter().find_map(replaced)) {
            now = Now::Unread(format!("is replaced by `{other}`"));
        }
        changes.push(Change { old: key.old, was, now });
    }
    changes
}

/// Replaces the old keys of `table` by the current keys. Returns a sentence about the replaced keys. Errors with the old keys for which
/// `table` also has the current key.
pub(super) fn translate(table: &mut Table) -> Result<Option<String>, Vec<String>> {
    let (mut told, mut problems) = (Vec::new(), Vec::new());
    for change in changes(table) {
        paths::remove(table, change.old);
        match &change.now {
            Now::Is(new, _) if paths::get(table, new).is_some() => {
                problems.push(format!("`{}` and `{new}` mean the same; keep one", change.old));
            }
            Now::Is(new, value) => problems.extend(insert(table, new, value.clone()).err()),
            Now::Nothing | Now::Unread(_) => {}
        }
        told.push(change.told());
    }
    if problems.is_empty() { Ok((!told.is_empty()).then(|| told.join(", "))) } else { Err(problems) }
}

/// The old key called `name` that the key at `path` replaces, if `table` has any old key that the key at `path` replaces: a file may still
/// use these old keys together.
pub(super) fn beside(table: &Table, path: &str, name: &str) -> Option<&'static str> {
    let same = || OLD.iter().filter(|key| key.has_moved() && key.new == path);
    let called = same().find(|key| key.old.rsplit('.').next() == Some(name))?;
    same().any(|key| paths::get(table, key.old).is_some()).then_some(called.old)
}

/// Removes the other spelling (old or new) of the key at `path`, because the key at `path` is set instead. An old key that the variant of
/// `table` does not read replaces nothing.
pub(super) fn forget(table: &mut Table, path: &str) {
    for key in OLD.iter().filter(|key| key.has_moved()) {
        let is_read =
            key.only.as_ref().is_none_or(|only| only.names.contains(&variant(table, only.tag).unwrap_or_default()));
        if key.new == path {
            paths::remove(table, key.old);
        } else if key.old == path && is_read {
            paths::remove(table, key.new);
        }
    }
}

/// Whether `found` is the value that TOML writes as `text`; numbers are equal whatever their kind.
fn is(found: &Value, text: &str) -> bool {
    let number = |value: &Value| value.as_float().or(value.as_integer().map(|number| number as f64));
    let other = value(text);
    *found == other || number(found).is_some() && number(found) == number(&other)
}

fn value(text: &str) -> Value {
    let table: Table = format!("value = {text}").parse().expect("our own values are TOML");
    table["value"].clone()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_keys_are_no_keys_of_now_and_become_such() {
        for key in OLD {
            assert!(keys::find(key.new).is_some(), "{}", key.new);
            assert_eq!(keys::find(key.old).is_none(), key.has_moved(), "{}", key.old);
            if let Some(Only { tag, names, default }) = &key.only {
                let of = keys::find(key.new).unwrap().variants.as_ref().unwrap();
                assert!(of.tag == *tag && names.iter().all(|name| of.names.iter().any(|known| known == name)));
                value(default);
            }
        }
    }
}
