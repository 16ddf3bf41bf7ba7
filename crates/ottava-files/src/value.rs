//! Converts values of columns to JSON.

use arrow_array::cast::AsArray;
use arrow_array::types::{
    Float16Type, Float32Type, Float64Type, Int8Type, Int16Type, Int32Type, Int64Type, UInt8Type, UInt16Type,
    UInt32Type, UInt64Type,
};
use arrow_array::{Array, RecordBatch};
use arrow_schema::DataType;
use serde_json::{Map, Value};

/// Returns record `row` of `batch`. A cell without a value is `null`. A column of a type that JSON lacks is omitted.
pub(crate) fn record(batch: &RecordBatch, row: usize) -> Map<String, Value> {
    let schema = batch.schema();
    let fields = schema.fields().iter().zip(batch.columns());
    let cell = |column: &dyn Array| if column.is_null(row) { Some(Value::Null) } else { value(column, row) };
    fields.filter_map(|(field, column)| Some((field.name().clone(), cell(column.as_ref())?))).collect()
}

/// Returns the type of column `name` of `batch`, if JSON lacks this type.
pub(crate) fn unread_type(batch: &RecordBatch, name: &str) -> Option<String> {
    let column = batch.column_by_name(name)?;
    let has_value = (0..column.len()).find(|row| !column.is_null(*row))?;
    value(column.as_ref(), has_value).is_none().then(|| column.data_type().to_string())
}

/// Returns element `row` of `array`; `None` if it has no value, or a type that JSON lacks.
fn value(array: &dyn Array, row: usize) -> Option<Value> {
    if array.is_null(row) {
        return None;
    }
    Some(match array.data_type() {
        DataType::Utf8 => array.as_string::<i32>().value(row).into(),
        DataType::LargeUtf8 => array.as_string::<i64>().value(row).into(),
        DataType::Utf8View => array.as_string_view().value(row).into(),
        DataType::Boolean => array.as_boolean().value(row).into(),
        DataType::Int8 => array.as_primitive::<Int8Type>().value(row).into(),
        DataType::Int16 => array.as_primitive::<Int16Type>().value(row).into(),
        DataType::Int32 => array.as_primitive::<Int32Type>().value(row).into(),
        DataType::Int64 => array.as_primitive::<Int64Type>().value(row).into(),
        DataType::UInt8 => array.as_primitive::<UInt8Type>().value(row).into(),
        DataType::UInt16 => array.as_primitive::<UInt16Type>().value(row).into(),
        DataType::UInt32 => array.as_primitive::<UInt32Type>().value(row).into(),
        DataType::UInt64 => array.as_primitive::<UInt64Type>().value(row).into(),
        DataType::Float16 => f64::from(array.as_primitive::<Float16Type>().value(row)).into(),
        DataType::Float32 => f64::from(array.as_primitive::<Float32Type>().value(row)).into(),
        DataType::Float64 => array.as_primitive::<Float64Type>().value(row).into(),
        DataType::List(_) => list(array.as_list::<i32>().value(row).as_ref()),
        DataType::LargeList(_) => list(array.as_list::<i64>().value(row).as_ref()),
        DataType::FixedSizeList(..) => list(array.as_fixed_size_list().value(row).as_ref()),
        DataType::Struct(fields) => {
            let columns = array.as_struct().columns();
            let values = fields.iter().zip(columns);
            Value::Object(
                values
                    .filter_map(|(field, column)| Some((field.name().clone(), value(column.as_ref(), row)?)))
                    .collect(),
            )
        }
        DataType::Dictionary(key, _) if **key == DataType::Int32 => {
            let dictionary = array.as_dictionary::<Int32Type>();
            return value(dictionary.values().as_ref(), dictionary.key(row)?);
        }
        DataType::Dictionary(key, _) if **key == DataType::Int8 => {
            let dictionary = array.as_dictionary::<Int8Type>();
            return value(dictionary.values().as_ref(), dictionary.key(row)?);
        }
        _ => return None,
    })
}

fn list(array: &dyn Array) -> Value {
    Value::Array((0..array.len()).map(|row| value(array, row).unwrap_or_default()).collect())
}
