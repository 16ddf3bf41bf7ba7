//! Filters of lists and dicts.

use std::sync::Arc;

use crate::arguments::{Argument, CallArguments, count};
use crate::error::{Result, fail};
use crate::eval::Rendering;
use crate::limits::Writer;
use crate::value::Value;
use crate::{compare, items, methods, ops, text};

impl Rendering<'_> {
    /// Computes `value | name(arguments)` if `name` is a filter of items; else returns `None`.
    pub(crate) fn item_filter(&self, name: &str, value: &Value, arguments: &CallArguments) -> Result<Option<Value>> {
        let limits = &self.limits;
        Ok(Some(match name {
            "first" => items::iterate(value, limits)?.first().cloned().unwrap_or_else(|| missing("first")),
            "last" => items::iterate(value, limits)?.last().cloned().unwrap_or_else(|| missing("last")),
            "list" => limits.list(items::iterate(value, limits)?)?,
            "items" => match value {
                Value::Undefined(_) => self.generator(Vec::new())?,
                Value::Dict(dict) => {
                    let pair = |(key, value): &(Value, Value)| limits.tuple(vec![key.clone(), value.clone()]);
                    self.generator(dict.entries.iter().map(pair).collect::<Result<Vec<_>>>()?)?
                }
                _ => return fail(format!("`items` needs a dict, and found {}", value.class())),
            },
            "reverse" => match value {
                Value::Str(text) => {
                    limits.work(text.len())?;
                    limits.text(text.chars().rev().collect::<String>())?
                }
                _ => self.generator(items::iterate(value, limits)?.into_iter().rev().collect())?,
            },
            "join" => self.join(value, arguments)?,
            "map" => self.map(value, arguments)?,
            "select" | "reject" | "selectattr" | "rejectattr" => self.select(name, value, arguments)?,
            "sort" => self.sort(value, arguments)?,
            "dictsort" => self.sort_dict(value, arguments)?,
            "unique" => self.unique(value, arguments)?,
            "min" | "max" => self.extreme(name, value, arguments)?,
            "sum" => self.sum(value, arguments)?,
            "groupby" => self.group(value, arguments)?,
            "batch" => self.batch(value, arguments)?,
            "slice" => self.slice_into(value, arguments)?,
            _ => return Ok(None),
        }))
    }

    /// Returns an attribute for the filter `attr`, which never returns an item.
    pub(crate) fn attr(&self, value: &Value, name: &str) -> Result<Value> {
        match value {
            Value::Dict(_) if !methods::exists(value, name) => {
                Ok(Value::Undefined(format!("'dict object' has no attribute '{name}'").into()))
            }
            _ => self.attribute(value, &name.into()),
        }
    }

    /// Returns the value at a path such as `function.name` or `0.name`.
    fn path(&self, value: &Value, path: &Value) -> Result<Value> {
        self.path_or(value, path, None)
    }

    /// Returns the value at a path. If a part is missing, its value is `default`.
    fn path_or(&self, value: &Value, path: &Value, default: Option<&Value>) -> Result<Value> {
        let Value::Str(path) = path else { return self.item(value, path) };
        let mut value = value.clone();
        for part in path.split('.') {
            let key = match part.parse::<i64>() {
                Ok(number) if part.bytes().all(|byte| byte.is_ascii_digit()) => Value::Int(number),
                _ => Value::text(part),
            };
            value = self.item(&value, &key)?;
            if let (true, Some(default)) = (value.is_undefined(), default) {
                value = default.clone();
            }
        }
        Ok(value)
    }

    /// Returns the key by which a filter compares `value`: the value or an attribute of it, in lower case unless `keeps_case`.
    fn key(&self, value: &Value, attribute: Option<&Value>, keeps_case: bool) -> Result<Value> {
        let key = attribute.map_or_else(|| Ok(value.clone()), |attribute| self.path(value, attribute))?;
        match &key {
            Value::Str(text) if !keeps_case => self.limits.text(text.to_lowercase()),
            _ => Ok(key),
        }
    }

    fn join(&self, value: &Value, arguments: &CallArguments) -> Result<Value> {
        let [separator, attribute] = arguments.bind("join", ["d", "attribute"])?;
        let separator = text::string(&separator.unwrap_or_else(|| Value::text("")), &self.limits)?;
        let attribute = attribute.filter(|attribute| !matches!(attribute, Value::None));
        let mut out = Writer::new(&self.limits);
        for (i, item) in items::iterate(value, &self.limits)?.iter().enumerate() {
            out.push(if i > 0 { &separator } else { "" })?;
            let item = attribute.as_ref().map_or_else(|| Ok(item.clone()), |attribute| self.path(item, attribute))?;
            text::write(&item, &mut out)?;
        }
        Ok(out.value())
    }

    fn map(&self, value: &Value, arguments: &CallArguments) -> Result<Value> {
        let items = items::iterate(value, &self.limits)?;
        let CallArguments { positional, named } = arguments;
        let Some(filter) = positional.first() else {
            let [attribute, default] = arguments.bind("map", ["attribute", "default"])?;
            let Some(attribute) = attribute else { return fail("`map` needs a filter or an `attribute`") };
            let one = |item: &Value| self.path_or(item, &attribute, default.as_ref());
            return self.generator(items.iter().map(one).collect::<Result<Vec<_>>>()?);
        };
        let Value::Str(filter) = filter else { return fail("`map` needs the name of a filter") };
        let arguments = CallArguments { positional: positional[1..].to_vec(), named: named.clone() };
        let one = |item: &Value| self.filter(filter, item, &arguments);
        self.generator(items.iter().map(one).collect::<Result<Vec<_>>>()?)
    }

    fn select(&self, name: &str, value: &Value, arguments: &CallArguments) -> Result<Value> {
        let mut positional = arguments.positional.iter();
        let attribute = if name.ends_with("attr") { positional.next() } else { None };
        if name.ends_with("attr") && attribute.is_none() {
            return fail(format!("`{name}` needs the name of an attribute"));
        }
        let test = positional.next().map(|test| text::string(test, &self.limits)).transpose()?;
        let more = CallArguments { positional: positional.cloned().collect(), named: arguments.named.clone() };
        let mut kept = Vec::new();
        for item in items::iterate(value, &self.limits)? {
            let tested = attribute.map_or_else(|| Ok(item.clone()), |attribute| self.path(&item, attribute))?;
            let passes = match &test {
                Some(test) => self.test(test, &tested, &more)?,
                None => tested.is_true(),
            };
            if passes == name.starts_with("select") {
                kept.push(item);
            }
        }
        self.generator(kept)
    }

    /// Pairs each item with the key by which it is compared.
    fn keyed(&self, items: Vec<Value>, attribute: Option<&Value>, keeps_case: bool) -> Result<Vec<(Value, Value)>> {
        let attribute = attribute.filter(|attribute| !matches!(attribute, Value::None));
        let paths: Vec<Value> = match attribute {
            Some(Value::Str(names)) if names.contains(',') => {
                names.split(',').map(|name| Value::text(name.trim())).collect()
            }
            attribute => attribute.into_iter().cloned().collect(),
        };
        let mut keyed = Vec::with_capacity(items.len());
        for item in items {
            let key = match paths.as_slice() {
                [] => self.key(&item, None, keeps_case)?,
                [path] => self.key(&item, Some(path), keeps_case)?,
                paths => {
                    let keys = paths.iter().map(|path| self.key(&item, Some(path), keeps_case));
                    self.limits.tuple(keys.collect::<Result<Vec<_>>>()?)?
                }
            };
            keyed.push((key, item));
        }
        Ok(keyed)
    }

    fn sort(&self, value: &Value, arguments: &CallArguments) -> Result<Value> {
        let parameters = ["reverse", "case_sensitive", "attribute"];
        let [reverse, keeps_case, attribute] = arguments.bind("sort", parameters)?;
        let items = items::iterate(value, &self.limits)?;
        let mut keyed = self.keyed(items, attribute.as_ref(), keeps_case.flag_or(false))?;
        compare::sort(&mut keyed, reverse.flag_or(false), &self.limits)?;
        self.limits.list(keyed.into_iter().map(|(_, item)| item).collect())
    }

    fn sort_dict(&self, value: &Value, arguments: &CallArguments) -> Result<Value> {
        let [keeps_case, by, reverse] = arguments.bind("dictsort", ["case_sensitive", "by", "reverse"])?;
        let Value::Dict(dict) = value else {
            return fail(format!("`dictsort` needs a dict, and found {}", value.class()));
        };
        let (keeps_case, by) = (keeps_case.flag_or(false), by.text_or("dictsort", "key")?);
        let mut keyed = Vec::new();
        for (key, value) in &dict.entries {
            let compared = self.key(if &*by == "value" { value } else { key }, None, keeps_case)?;
            keyed.push((compared, self.limits.tuple(vec![key.clone(), value.clone()])?));
        }
        compare::sort(&mut keyed, reverse.flag_or(false), &self.limits)?;
        self.limits.list(keyed.into_iter().map(|(_, pair)| pair).collect())
    }

    fn unique(&self, value: &Value, arguments: &CallArguments) -> Result<Value> {
        let [keeps_case, attribute] = arguments.bind("unique", ["case_sensitive", "attribute"])?;
        let items = items::iterate(value, &self.limits)?;
        let (mut seen, mut kept): (Vec<Value>, Vec<Value>) = (Vec::new(), Vec::new());
        for (key, item) in self.keyed(items, attribute.as_ref(), keeps_case.flag_or(false))? {
            let mut is_new = true;
            for known in &seen {
                if compare::equal(known, &key, &self.limits)? {
                    is_new = false;
                    break;
                }
            }
            if is_new {
                seen.push(key);
                kept.push(item);
            }
        }
        self.generator(kept)
    }

    fn extreme(&self, name: &str, value: &Value, arguments: &CallArguments) -> Result<Value> {
        let [keeps_case, attribute] = arguments.bind(name, ["case_sensitive", "attribute"])?;
        let items = items::iterate(value, &self.limits)?;
        let mut best: Option<(Value, Value)> = None;
        for (key, item) in self.keyed(items, attribute.as_ref(), keeps_case.flag_or(false))? {
            let op = if name == "min" { "<" } else { ">" };
            let is_better = best.as_ref().map(|(known, _)| self.holds(op, &key, known)).transpose()?;
            if is_better != Some(false) {
                best = Some((key, item));
            }
        }
        Ok(best.map_or_else(|| Value::Undefined("No aggregated item, sequence was empty.".into()), |(_, item)| item))
    }

    fn sum(&self, value: &Value, arguments: &CallArguments) -> Result<Value> {
        let [attribute, start] = arguments.bind("sum", ["attribute", "start"])?;
        let attribute = attribute.filter(|attribute| !matches!(attribute, Value::None));
        let mut total = start.unwrap_or(Value::Int(0));
        for item in items::iterate(value, &self.limits)? {
            let item = attribute.as_ref().map_or_else(|| Ok(item.clone()), |attribute| self.path(&item, attribute))?;
            total = ops::binary("+", &total, &item, &self.limits)?;
        }
        Ok(total)
    }

    /// Groups items by an attribute. Returns pairs of the attribute and the list of its items.
    fn group(&self, value: &Value, arguments: &CallArguments) -> Result<Value> {
        let [attribute, default, keeps_case] = arguments.bind("groupby", ["attribute", "default", "case_sensitive"])?;
        let Some(attribute) = attribute else { return fail("`groupby` needs an attribute") };
        let keeps_case = keeps_case.flag_or(false);
        let mut keyed = Vec::new();
        for item in items::iterate(value, &self.limits)? {
            let found = self.path_or(&item, &attribute, default.as_ref())?;
            keyed.push((self.key(&found, None, keeps_case)?, self.limits.tuple(vec![found, item])?));
        }
        compare::sort(&mut keyed, false, &self.limits)?;
        let mut groups: Vec<(Value, Value, Vec<Value>)> = Vec::new();
        for (key, pair) in keyed {
            let [found, item] = pair.items().unwrap_or_default() else { unreachable!("it is a pair") };
            match groups.last_mut() {
                Some((known, _, items)) if compare::equal(known, &key, &self.limits)? => items.push(item.clone()),
                _ => groups.push((key, found.clone(), vec![item.clone()])),
            }
        }
        let pair = |(_, found, items)| self.limits.tuple(vec![found, self.limits.list(items)?]);
        self.limits.list(groups.into_iter().map(pair).collect::<Result<Vec<_>>>()?)
    }

    fn batch(&self, value: &Value, arguments: &CallArguments) -> Result<Value> {
        let [size, fill] = arguments.bind("batch", ["linecount", "fill_with"])?;
        let size = count(size.whole_or("batch", 1)?).max(1);
        let mut batches = Vec::new();
        for items in items::iterate(value, &self.limits)?.chunks(size) {
            let mut items = items.to_vec();
            if let Some(fill) = fill.as_ref().filter(|fill| !matches!(fill, Value::None)) {
                self.limits.room_for_items(size)?;
                items.resize(size, fill.clone());
            }
            batches.push(self.limits.list(items)?);
        }
        self.generator(batches)
    }

    /// Divides items into a number of lists.
    fn slice_into(&self, value: &Value, arguments: &CallArguments) -> Result<Value> {
        let [slices, fill] = arguments.bind("slice", ["slices", "fill_with"])?;
        let (slices, items) = (count(slices.whole_or("slice", 1)?), items::iterate(value, &self.limits)?);
        if slices == 0 {
            return fail("`slice` needs at least one slice");
        }
        self.limits.room_for_items(slices)?;
        let (each, longer) = (items.len() / slices, items.len() % slices);
        let fill = fill.filter(|fill| !matches!(fill, Value::None));
        let (mut lists, mut rest) = (Vec::with_capacity(slices), items.as_slice());
        for slice in 0..slices {
            let (mut part, after) = {
                let (part, after) = rest.split_at(each + usize::from(slice < longer));
                (part.to_vec(), after)
            };
            rest = after;
            part.extend(fill.clone().filter(|_| slice >= longer && longer > 0));
            lists.push(self.limits.list(part)?);
        }
        self.generator(lists)
    }
}

/// Returns the undefined value for the first or last item of an empty list.
fn missing(which: &str) -> Value {
    Value::Undefined(Arc::from(format!("No {which} item, sequence was empty.")))
}
