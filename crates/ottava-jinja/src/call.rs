//! Calls of global functions, macros and objects.

use std::sync::Arc;

use crate::arguments::{Argument, CallArguments, pairs, unique};
use crate::ast::Macro;
use crate::error::{Result, fail};
use crate::eval::{Object, Rendering};
use crate::limits::Limits;
use crate::value::{Value, ViewKind};
use crate::{compare, methods, number, text};

/// The maximum length of a `range`, as in Jinja's sandbox.
const MAX_RANGE: usize = 100_000;

impl<'t> Rendering<'t> {
    /// Calls a value.
    pub(crate) fn call(&mut self, callee: &Value, arguments: CallArguments) -> Result<Value> {
        match callee {
            Value::Undefined(why) => fail(why.to_string()),
            Value::Function(name) => self.call_function(name, arguments),
            Value::Method(method) => match &method.0 {
                Value::Object(object) => self.call_object_method(*object, &method.1, arguments),
                object => methods::call(object, &method.1, &arguments, &self.limits),
            },
            Value::Object(object) => match &mut self.objects[*object] {
                Object::Macro(..) => self.call_macro(*object, arguments),
                Object::Loop(_) => {
                    let [items] = arguments.bind("loop", ["iterable"])?;
                    self.recurse(*object, &items.unwrap_or(Value::None))
                }
                Object::Joiner { separator, used } => {
                    let first = !std::mem::replace(used, true);
                    Ok(if first { Value::text("") } else { separator.clone() })
                }
                Object::Namespace(_) | Object::Cycler { .. } => fail("the object cannot be called"),
            },
            _ => fail(format!("{} cannot be called", callee.class())),
        }
    }

    fn call_function(&mut self, name: &str, arguments: CallArguments) -> Result<Value> {
        match name {
            "range" => range(&arguments, &self.limits),
            "dict" | "namespace" => {
                let mut entries: Vec<(Value, Value)> = Vec::new();
                for value in &arguments.positional {
                    match value {
                        Value::Dict(dict) => entries.extend(dict.entries.iter().cloned()),
                        _ => entries.extend(pairs(name, value, &self.limits)?),
                    }
                }
                entries.extend(arguments.named.iter().map(|(name, value)| (Value::Str(name.clone()), value.clone())));
                let Value::Dict(dict) = unique(entries, &self.limits)? else { unreachable!("it is a dict") };
                if name == "dict" {
                    return Ok(Value::Dict(dict));
                }
                let mut attributes = Vec::new();
                for (key, value) in &dict.entries {
                    attributes.push((text::string(key, &self.limits)?, value.clone()));
                }
                self.object(Object::Namespace(attributes))
            }
            "cycler" => self.object(Object::Cycler { items: arguments.positional, at: 0 }),
            "joiner" => {
                let [separator] = arguments.bind(name, ["sep"])?;
                self.object(Object::Joiner { separator: separator.unwrap_or_else(|| Value::text(", ")), used: false })
            }
            "raise_exception" => {
                let [message] = arguments.bind(name, ["message"])?;
                fail(text::string(&message.unwrap_or(Value::None), &self.limits)?.to_string())
            }
            _ => {
                let [format] = arguments.bind(name, ["format"])?;
                let text = self.clock.format(&format.text_or(name, "")?);
                text.map_or_else(fail, |text| self.limits.text(text))
            }
        }
    }

    /// Renders the body of a macro. Its arguments are variables of the body.
    fn call_macro(&mut self, object: usize, arguments: CallArguments) -> Result<Value> {
        let Object::Macro(called, scope) = self.objects[object] else { unreachable!("the caller has looked") };
        let Macro { name, parameters, body, .. } = called;
        let outside = self.enter(scope)?;
        let CallArguments { positional, named } = arguments;
        let mut positional = positional.into_iter();
        let mut named: Vec<(Arc<str>, Value)> = named;
        for (parameter, default) in parameters {
            let by_name = named.iter().position(|(name, _)| name == parameter);
            let value = match (positional.next(), by_name, default) {
                (Some(_), Some(_), _) => return fail(format!("macro `{name}` is given `{parameter}` twice")),
                (Some(value), ..) => value,
                (None, Some(at), _) => named.remove(at).1,
                (None, None, Some(default)) => self.evaluate(default)?,
                (None, None, None) => Value::Undefined(format!("parameter '{parameter}' was not provided").into()),
            };
            self.assign(parameter, value)?;
        }
        let more: Vec<Value> = positional.collect();
        if !more.is_empty() && !called.takes_more {
            return fail(format!("macro `{name}` takes {} arguments at most", parameters.len()));
        }
        if let Some(at) = named.iter().position(|(name, _)| **name == *"caller") {
            let caller = named.remove(at).1;
            self.assign(&"caller".into(), caller)?;
        }
        if let Some((argument, _)) = named.first()
            && !called.takes_more_named
        {
            return fail(format!("macro `{name}` has no argument `{argument}`"));
        }
        let more = self.limits.tuple(more)?;
        self.assign(&"varargs".into(), more)?;
        let named = named.into_iter().map(|(name, value)| (Value::Str(name), value)).collect();
        let named = self.limits.dict(named)?;
        self.assign(&"kwargs".into(), named)?;
        let text = self.capture(body)?;
        self.leave(outside);
        Ok(text)
    }

    fn call_object_method(&mut self, object: usize, name: &str, arguments: CallArguments) -> Result<Value> {
        match (&mut self.objects[object], name) {
            (Object::Cycler { items, at }, "next" | "reset") if !items.is_empty() => {
                let current = items[*at].clone();
                *at = if name == "next" { (*at + 1) % items.len() } else { 0 };
                Ok(if name == "next" { current } else { Value::None })
            }
            (Object::Loop(state), "cycle") if !arguments.positional.is_empty() => {
                Ok(arguments.positional[state.index % arguments.positional.len()].clone())
            }
            (Object::Loop(state), "changed") => {
                let now = self.limits.tuple(arguments.positional)?;
                let before = state.changed.replace(now.clone());
                let same = before.map(|before| compare::equal(&before, &now, &self.limits)).transpose()?;
                Ok(Value::Bool(same != Some(true)))
            }
            _ => fail(format!("`{name}` cannot be called")),
        }
    }
}

fn range(arguments: &CallArguments, limits: &Limits) -> Result<Value> {
    let numbers: Option<Vec<i64>> = arguments.positional.iter().map(number::small).collect();
    let (start, stop, step) = match numbers.as_deref() {
        Some([stop]) => (0, *stop, 1),
        Some([start, stop]) => (*start, *stop, 1),
        Some([start, stop, step]) if *step != 0 => (*start, *stop, *step),
        _ => return fail("`range` needs one to three integers, the third of them not zero"),
    };
    let distance = if step > 0 { stop as i128 - start as i128 } else { start as i128 - stop as i128 };
    let step_size = (step as i128).abs();
    let count = ((distance + step_size - 1) / step_size).max(0);
    let Some(count) = usize::try_from(count).ok().filter(|count| *count <= MAX_RANGE) else {
        return fail(format!("`range` has more than {MAX_RANGE} numbers"));
    };
    limits.room_for_items(count)?;
    let items = (0..count).map(|i| Value::Int(start + i as i64 * step)).collect();
    let shown = if step == 1 { format!("range({start}, {stop})") } else { format!("range({start}, {stop}, {step})") };
    limits.view(ViewKind::Range(shown), items)
}
